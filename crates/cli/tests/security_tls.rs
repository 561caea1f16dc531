//! TLS towards clients and towards workers: what is trusted, what is refused, and in which words.
#![allow(clippy::expect_used, clippy::panic, reason = "it is all test")]

mod command;
mod support;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use pointsman_sim::mock::{EngineConfig, MockEngine, Role};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};
use serde_json::{Value, json};
use support::fleet::{MODEL, completion, configuration, prompt};
use support::{Fleet, Metrics, Request, Router, SOON, unified, wait_until};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// An authority and the files of what it signed.
struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
    dir: TempDir,
}

/// A certificate and its key, as PEM files.
#[derive(Clone)]
struct Signed {
    certificate: PathBuf,
    key: PathBuf,
}

impl Authority {
    fn new() -> Authority {
        let mut params = CertificateParams::new(Vec::new()).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("a key");
        let issuer = CertifiedIssuer::self_signed(params, key).expect("an authority");
        let dir = tempfile::tempdir().expect("a directory");
        std::fs::write(dir.path().join("ca.pem"), issuer.pem()).expect("a file");
        Authority { issuer, dir }
    }

    fn ca(&self) -> PathBuf {
        self.dir.path().join("ca.pem")
    }

    fn sign(&self, name: &str) -> Signed {
        self.sign_with(name, |_| {})
    }

    fn sign_with(&self, name: &str, change: impl FnOnce(&mut CertificateParams)) -> Signed {
        let names = vec!["127.0.0.1".to_owned(), "localhost".to_owned()];
        let mut params = CertificateParams::new(names).expect("names");
        change(&mut params);
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.issuer).expect("a certificate");
        let at = |end: &str| self.dir.path().join(format!("{name}.{end}"));
        let signed = Signed { certificate: at("pem"), key: at("key") };
        std::fs::write(&signed.certificate, certificate.pem()).expect("a file");
        std::fs::write(&signed.key, key.serialize_pem()).expect("a file");
        signed
    }

    fn roots(&self) -> RootCertStore {
        let mut roots = RootCertStore::empty();
        roots.add(self.issuer.der().clone()).expect("an authority");
        roots
    }

    /// A client that trusts this authority.
    fn client(&self, identity: Option<&Signed>) -> TlsConnector {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_root_certificates(self.roots());
        let mut config = match identity {
            None => builder.with_no_client_auth(),
            Some(signed) => {
                let (chain, key) = signed.load();
                builder.with_client_auth_cert(chain, key).expect("an identity")
            }
        };
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        TlsConnector::from(Arc::new(config))
    }
}

impl Signed {
    fn tls(&self) -> Value {
        json!({"certificate": self.certificate, "key": self.key})
    }

    fn load(&self) -> (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>) {
        let chain = CertificateDer::pem_file_iter(&self.certificate).expect("a file");
        let key = PrivateKeyDer::from_pem_file(&self.key).expect("a key");
        (chain.collect::<Result<_, _>>().expect("certificates"), key)
    }
}

/// The status of `/health` by TLS and the certificate that was shown.
async fn health(
    client: &TlsConnector,
    to: SocketAddr,
) -> std::io::Result<(String, CertificateDer<'static>)> {
    let exchange = async {
        let name = ServerName::try_from("localhost").expect("a name");
        let mut stream = client.connect(name, TcpStream::connect(to).await?).await?;
        let (_, session) = stream.get_ref();
        assert_eq!(session.alpn_protocol(), Some(&b"http/1.1"[..]));
        let shown = session.peer_certificates().expect("one is shown")[0].clone().into_owned();
        stream.write_all(b"GET /health HTTP/1.1\r\nhost: r\r\nconnection: close\r\n\r\n").await?;
        let mut reply = Vec::new();
        stream.read_to_end(&mut reply).await?;
        let reply = String::from_utf8_lossy(&reply).into_owned();
        Ok((reply.split(' ').nth(1).unwrap_or_default().to_owned(), shown))
    };
    timeout(SOON, exchange).await.expect("it ends")
}

async fn is_served(client: &TlsConnector, to: SocketAddr) -> bool {
    health(client, to).await.is_ok_and(|(status, _)| status == "200")
}

async fn served_with(tls: Value, over: Value) -> Fleet {
    let mut tree = json!({"listen": {"tls": tls}});
    support::merge(&mut tree, over);
    Fleet::with([unified("u0")], tree).await
}

#[tokio::test]
async fn the_api_is_served_by_tls_to_those_who_trust_its_authority() {
    let (ours, other) = (Authority::new(), Authority::new());
    let fleet = served_with(ours.sign("router").tls(), json!({})).await;
    assert!(is_served(&ours.client(None), fleet.addr()).await);
    assert!(!is_served(&other.client(None), fleet.addr()).await);
    // Plain HTTP gets no answer of the API.
    let mut plain = TcpStream::connect(fleet.addr()).await.expect("it listens");
    plain.write_all(b"GET /health HTTP/1.1\r\nhost: r\r\n\r\n").await.expect("it is sent");
    let mut reply = Vec::new();
    let _ = timeout(SOON, plain.read_to_end(&mut reply)).await.expect("it is closed");
    assert!(!reply.starts_with(b"HTTP"), "{reply:?}");
    assert!(is_served(&ours.client(None), fleet.addr()).await, "and nobody else is harmed");
}

#[tokio::test]
async fn handshakes_that_do_not_go_on_are_ended_and_hold_nobody_up() {
    let ours = Authority::new();
    let over = json!({"timeouts": {"header_read": "1s"}});
    let fleet = served_with(ours.sign("router").tls(), over).await;
    let mut silent = Vec::new();
    for _ in 0..50 {
        silent.push(TcpStream::connect(fleet.addr()).await.expect("it listens"));
    }
    assert!(is_served(&ours.client(None), fleet.addr()).await);
    for mut stream in silent {
        let mut reply = Vec::new();
        let _ = timeout(SOON, stream.read_to_end(&mut reply)).await.expect("it is closed");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_is_explained_by_tls_to_who_trusts_its_authority() {
    let ours = Authority::new();
    let fleet = served_with(ours.sign("router").tls(), json!({})).await;
    let url = format!("https://{}", fleet.addr());
    let body = completion(&prompt(1, 20), 2, false).to_string();
    let ca = ours.ca();
    let ca = ca.to_str().expect("text");
    let told = command::run(&["explain", "--url", &url, "--ca", ca, "-"], &[], &body);
    assert_eq!(told.code, Some(0), "{told:?}");
    let told = command::run(&["explain", "--url", &url, "-"], &[], &body);
    assert_eq!(told.code, Some(1), "{told:?}");
    assert!(told.err.contains("cannot be reached by TLS"), "{told:?}");
    assert!(told.err.contains("PEM file in `--ca`"), "{told:?}");
    let told = command::run(&["explain", "--url", &url, "--ca", "/nowhere", "-"], &[], &body);
    assert!(told.code == Some(1) && told.err.contains("\"/nowhere\""), "{told:?}");
}

/// TLS handshakes that may be under way at one listener.
const HANDSHAKES: usize = 1024;

#[tokio::test]
async fn handshakes_beyond_their_bound_are_refused_and_counted_and_leave_room_when_they_end() {
    let ours = Authority::new();
    let own = json!({"admin": {"listen": {"address": "127.0.0.1", "port": 0}}});
    let fleet = served_with(ours.sign("router").tls(), own).await;
    let client = ours.client(None);
    let mut silent = Vec::new();
    for _ in 0..HANDSHAKES {
        silent.push(TcpStream::connect(fleet.addr()).await.expect("it listens"));
    }
    let mut further = TcpStream::connect(fleet.addr()).await.expect("it listens");
    let closed = timeout(SOON, further.read(&mut [0; 1])).await.expect("it is closed at once");
    assert!(matches!(closed, Ok(0) | Err(_)), "{closed:?}");
    assert!(!is_served(&client, fleet.addr()).await);
    let asked = Request::get("/metrics").send(fleet.router.admin_addr()).await.1;
    let refused = [("signal", "tls_handshakes")];
    let refused = Metrics::parse(&asked.text()).count("pointsman_requests_refused_total", &refused);
    assert_eq!(refused, 2);
    drop(silent);
    wait_until(async || match is_served(&client, fleet.addr()).await {
        true => Ok(()),
        false => Err("there is no room".to_owned()),
    })
    .await;
}

#[tokio::test]
async fn with_client_ca_only_clients_of_that_authority_get_in() {
    let (ours, other) = (Authority::new(), Authority::new());
    let mut tls = ours.sign("router").tls();
    tls["client_ca"] = json!(ours.ca());
    let fleet = served_with(tls, json!({})).await;
    assert!(is_served(&ours.client(Some(&ours.sign("client"))), fleet.addr()).await);
    assert!(!is_served(&ours.client(None), fleet.addr()).await);
    assert!(!is_served(&ours.client(Some(&other.sign("client"))), fleet.addr()).await);
}

#[tokio::test]
async fn at_sighup_the_files_are_read_again_and_broken_ones_change_nothing() {
    let ours = Authority::new();
    let signed = ours.sign("router");
    let fleet = served_with(signed.tls(), json!({})).await;
    let client = ours.client(None);
    let shown = async || health(&client, fleet.addr()).await.expect("it is served").1;
    let first = shown().await;
    ours.sign("router");
    assert_eq!(shown().await, first, "not before the signal");
    fleet.router.signal("HUP");
    wait_until(async || match shown().await == first {
        true => Err("the old certificate".to_owned()),
        false => Ok(()),
    })
    .await;
    let second = shown().await;
    std::fs::write(&signed.certificate, "nothing").expect("a file");
    fleet.router.signal("HUP");
    wait_until(async || match fleet.router.log().contains("router.pem") {
        false => Err("no line on the broken file".to_owned()),
        true => Ok(()),
    })
    .await;
    assert_eq!(shown().await, second);
}

#[test]
fn files_that_cannot_be_used_stop_the_start_and_are_named() {
    let ours = Authority::new();
    let (a, b) = (ours.sign("a"), ours.sign("b"));
    let broken = ours.dir.path().join("broken.pem");
    std::fs::write(&broken, "-----BEGIN CERTIFICATE-----\n!\n").expect("a file");
    for (tls, key, named) in [
        (json!({"certificate": a.certificate, "key": b.key}), "listen.tls.key", "b.key"),
        (json!({"certificate": broken, "key": a.key}), "listen.tls.certificate", "broken.pem"),
        (json!({"certificate": a.certificate, "key": a.certificate}), "listen.tls.key", "a.pem"),
        (json!({"certificate": "/none.pem", "key": a.key}), "listen.tls.certificate", "/none.pem"),
    ] {
        let worker = json!([{"url": "http://127.0.0.1:1", "role": "unified"}]);
        let tree = configuration(&worker, json!({"listen": {"tls": tls}}));
        let file = ours.dir.path().join("pointsman.yaml");
        std::fs::write(&file, tree.to_string()).expect("a file");
        for command in ["serve", "check"] {
            let ended = command::run(&[command, "-c", &file.to_string_lossy()], &[], "");
            assert_eq!(ended.code, Some(1), "{ended:?}");
            assert!(ended.err.contains(key) && ended.err.contains(named), "{ended:?}");
        }
    }
}

/// An engine behind TLS.
struct Secure {
    addr: SocketAddr,
    _engine: MockEngine,
}

async fn engine(signed: &Signed, clients: Option<&Authority>) -> Secure {
    let config = EngineConfig {
        speed: f64::INFINITY,
        model: MODEL.into(),
        ..EngineConfig::of(Role::Unified)
    };
    let engine = MockEngine::start(config).await.expect("the engine starts");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .expect("versions");
    let builder = match clients {
        None => builder.with_no_client_auth(),
        Some(authority) => builder.with_client_cert_verifier(
            WebPkiClientVerifier::builder_with_provider(Arc::new(authority.roots()), provider)
                .build()
                .expect("a verifier"),
        ),
    };
    let (chain, key) = signed.load();
    let config = builder.with_single_cert(chain, key).expect("a pair");
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let (addr, to) = (listener.local_addr().expect("bound"), engine.addr());
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let Ok(mut secure) = acceptor.accept(stream).await else { return };
                let Ok(mut plain) = TcpStream::connect(to).await else { return };
                let _ = tokio::io::copy_bidirectional(&mut secure, &mut plain).await;
            });
        }
    });
    Secure { addr, _engine: engine }
}

/// A router in front of one engine by TLS.
async fn before(engine: &Secure, tls: Value) -> (Router, Value) {
    let url = format!("https://{}", engine.addr);
    let worker = json!([{"name": "u0", "url": url, "role": "unified", "kv_events": "off"}]);
    let tree = configuration(&worker, json!({"upstream": {"tls": tls}}));
    (Router::start(&tree).await, tree)
}

/// The router serves nothing and says why, on the workers' page, in its log and in `check`.
async fn assert_told(engine: &Secure, tls: Value, words: &str) {
    let (router, tree) = before(engine, tls).await;
    let (head, _) = router.complete(&completion(&prompt(1, 20), 2, false)).await;
    assert_eq!(head.status, 503);
    let problem = router.worker("u0").await.expect("it is listed")["problem"].clone();
    assert!(problem.as_str().is_some_and(|problem| problem.contains(words)), "{problem}");
    let log = router.log();
    let told = log.lines().any(|line| line.contains(words) && line.contains("u0"));
    assert!(told, "{log}");
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("pointsman.yaml");
    std::fs::write(&file, tree.to_string()).expect("a file");
    let check = move || command::run(&["check", "-c", &file.to_string_lossy()], &[], "");
    let ended = tokio::task::spawn_blocking(check).await.expect("it ends");
    assert_eq!(ended.code, Some(1));
    assert!(ended.out.contains("u0") && ended.out.contains(words), "{ended:?}");
}

async fn assert_serves(engine: &Secure, tls: Value) {
    let (router, _) = before(engine, tls).await;
    for seed in 0..3 {
        let (head, body) = router.complete(&completion(&prompt(seed, 20), 2, false)).await;
        assert_eq!(head.status, 200, "{body:?}");
    }
    let worker = router.worker("u0").await.expect("it is listed");
    assert_eq!(worker["problem"], Value::Null);
    wait_until(async || {
        // Read from the engine's metrics, which go the same way.
        let worker = router.worker("u0").await.expect("it is listed");
        if worker["reading_age_seconds"].is_number() { Ok(()) } else { Err(worker.to_string()) }
    })
    .await;
}

#[tokio::test]
async fn workers_behind_tls_are_served_from_where_their_authority_is_known() {
    let (ours, other) = (Authority::new(), Authority::new());
    let engine = engine(&ours.sign("engine"), None).await;
    assert_serves(&engine, json!({"ca": ours.ca()})).await;
    assert_told(&engine, json!({"ca": other.ca()}), "`upstream.tls.ca`").await;
    assert_told(&engine, json!({}), "`upstream.tls.ca`").await;
}

#[tokio::test]
async fn a_workers_expired_certificate_is_said_to_be_that() {
    let ours = Authority::new();
    let expired = ours.sign_with("engine", |params| {
        params.not_before = rcgen::date_time_ymd(2019, 1, 1);
        params.not_after = rcgen::date_time_ymd(2020, 1, 1);
    });
    let engine = engine(&expired, None).await;
    assert_told(&engine, json!({"ca": ours.ca()}), "expired").await;
}

#[tokio::test]
async fn a_workers_certificate_for_another_host_is_said_to_be_that() {
    let ours = Authority::new();
    let elsewhere = ours.sign_with("engine", |params| {
        // What is left is `localhost`, and the URL has the address.
        params.subject_alt_names.remove(0);
    });
    let engine = engine(&elsewhere, None).await;
    assert_told(&engine, json!({"ca": ours.ca()}), "another host").await;
}

#[tokio::test]
async fn workers_that_want_a_certificate_get_the_routers() {
    let ours = Authority::new();
    let engine = engine(&ours.sign("engine"), Some(&ours)).await;
    let router = ours.sign("router");
    let mut tls = router.tls();
    tls["ca"] = json!(ours.ca());
    assert_serves(&engine, tls).await;
    assert_told(&engine, json!({"ca": ours.ca()}), "`upstream.tls.certificate`").await;
}

#[tokio::test]
async fn at_sighup_trust_in_workers_is_read_again_and_a_broken_file_changes_nothing() {
    let (ours, other) = (Authority::new(), Authority::new());
    let engine = engine(&ours.sign("engine"), None).await;
    let ca = other.dir.path().join("trusted.pem");
    std::fs::copy(other.ca(), &ca).expect("a file");
    let (router, _) = before(&engine, json!({"ca": ca})).await;
    let status = async |seed| {
        let (head, _) = router.complete(&completion(&prompt(seed, 20), 2, false)).await;
        head.status
    };
    assert_eq!(status(1).await, 503);
    std::fs::copy(ours.ca(), &ca).expect("a file");
    router.signal("HUP");
    wait_until(async || match status(2).await {
        200 => Ok(()),
        status => Err(format!("the worker is not trusted: {status}")),
    })
    .await;
    std::fs::write(&ca, "nothing").expect("a file");
    router.signal("HUP");
    wait_until(async || match router.log().contains("trust in workers stays as it was") {
        true => Ok(()),
        false => Err("no line on the broken file".to_owned()),
    })
    .await;
    assert_eq!(status(3).await, 200);
}
