//! The real binary as a child of the test: started, asked, signalled, ended.

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use serde_json::Value;
use tempfile::TempDir;

use super::client::{Body, Request};
use super::metrics::Metrics;
use super::wait_for;

/// A running `pointsman serve`. Dropped, it is killed.
pub struct Router {
    child: Child,
    addr: SocketAddr,
    admin: Option<SocketAddr>,
    log: Arc<Mutex<String>>,
    reader: Option<JoinHandle<()>>,
    _dir: TempDir,
}

impl Router {
    /// Starts `pointsman serve` with a configuration and waits until it is ready.
    pub async fn start(config: &Value) -> Router {
        Router::start_under(&[], config).await
    }

    /// The same by a command that ends in running what follows it, in the same process.
    pub async fn start_under(command: &[&str], config: &Value) -> Router {
        let (config, command) = (config.clone(), command.iter().map(|&word| word.to_owned()));
        let command: Vec<String> = command.collect();
        let start = move || Router::start_now(command, &config);
        tokio::task::spawn_blocking(start).await.expect("it starts")
    }

    fn start_now(mut command: Vec<String>, config: &Value) -> Router {
        let dir = tempfile::tempdir().expect("a directory for the configuration");
        let file = dir.path().join("pointsman.yaml");
        std::fs::write(&file, config.to_string()).expect("a file for the configuration");
        command.extend([env!("CARGO_BIN_EXE_pointsman"), "serve", "-c"].map(str::to_owned));
        let mut child = Command::new(&command[0])
            .args(&command[1..])
            .arg(&file)
            // Whatever the environment of the test holds is no setting of this router.
            .env_clear()
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        let log = Arc::new(Mutex::new(String::new()));
        let errors = BufReader::new(child.stderr.take().expect("it is piped"));
        let sink = Arc::clone(&log);
        let reader = std::thread::spawn(move || {
            for line in errors.lines().map_while(Result::ok) {
                let mut log = sink.lock().unwrap_or_else(PoisonError::into_inner);
                log.push_str(&line);
                log.push('\n');
            }
        });
        let mut out = BufReader::new(child.stdout.take().expect("it is piped"));
        let mut line = String::new();
        let _ = out.read_line(&mut line);
        let url = line.trim().strip_prefix("pointsman is ready on ");
        let addr = url.and_then(|url| url.split_once("://")).map(|(_, addr)| addr.parse());
        let Some(Ok(addr)) = addr else {
            let _ = child.kill();
            let _ = child.wait();
            let _ = reader.join();
            let log = log.lock().unwrap_or_else(PoisonError::into_inner);
            panic!("no word of readiness but {line:?}; its log:\n{log}");
        };
        let mut admin = None;
        if config["admin"]["listen"].is_object() {
            let mut line = String::new();
            let _ = out.read_line(&mut line);
            let addr = line.trim().strip_prefix("metrics and administration are on ");
            admin = Some(addr.expect("it says where").parse().expect("an address"));
        }
        std::thread::spawn(move || {
            let _ = out.read_to_end(&mut Vec::new());
        });
        Router { child, addr, admin, log, reader: Some(reader), _dir: dir }
    }

    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Where it serves metrics and administration, if that is apart.
    pub fn admin_addr(&self) -> SocketAddr {
        self.admin.expect("`admin.listen` is set")
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it has logged so far.
    pub fn log(&self) -> String {
        self.log.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Asks it to end.
    pub fn terminate(&self) {
        self.signal("TERM");
    }

    /// Sends it a signal.
    pub fn signal(&self, name: &str) {
        let kill =
            Command::new("sh").arg("-c").arg(format!("kill -{name} {}", self.pid())).status();
        assert!(kill.is_ok_and(|status| status.success()), "the router is there to be signalled");
    }

    /// Waits until the process has ended.
    pub async fn ended(&mut self) -> ExitStatus {
        let child = &mut self.child;
        wait_for("the end of the process", async || child.try_wait().expect("a child")).await
    }

    pub async fn metrics(&self) -> Metrics {
        let (head, body) = Request::get("/metrics").send(self.addr).await;
        assert_eq!(head.status, 200);
        Metrics::parse(&body.text())
    }

    /// `/v1/pointsman/status`
    pub async fn status(&self) -> Value {
        Request::get("/v1/pointsman/status").json(self.addr).await.1
    }

    /// One worker's entry of `/v1/pointsman/workers`.
    pub async fn worker(&self, name: &str) -> Option<Value> {
        let (_, json) = Request::get("/v1/pointsman/workers").json(self.addr).await;
        json["workers"].as_array()?.iter().find(|worker| worker["name"] == name).cloned()
    }

    /// Whether `/ready` answers 200, and its body.
    pub async fn ready(&self) -> (bool, Value) {
        let (head, json) = Request::get("/ready").json(self.addr).await;
        assert!(matches!(head.status, 200 | 503), "{head:?}");
        (head.status == 200, json)
    }

    /// A completion that is no stream.
    pub async fn complete(&self, json: &Value) -> (super::Head, Body) {
        Request::completion(json).send(self.addr).await
    }
}

impl Drop for Router {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
        if std::thread::panicking() {
            eprintln!("--- the router's log ---\n{}--- end ---", self.log());
        }
    }
}
