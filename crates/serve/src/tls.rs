//! TLS of listeners and towards workers: files read into rustls' settings, and what went wrong in words
//! that name the file or say what to do.
//!
//! Invariants: `ring` is the one provider; TLS 1.2 is the least version; HTTP/1.1 the one protocol.

use std::error::Error as StdError;
use std::fmt::Display;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use pointsman_config::{ListenTls, UpstreamTls};
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::ServerCertVerifier;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{
    AlertDescription, CertificateError, ClientConfig, InvalidMessage, RootCertStore, ServerConfig,
};

/// A file that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{key}: {path:?} {problem}")]
pub struct TlsError {
    /// The key of the configuration.
    key: String,
    path: PathBuf,
    problem: String,
}

/// A section of the configuration whose files are read.
struct Files<'a>(&'a str);

impl Files<'_> {
    fn error(&self, key: &str, path: &Path, problem: impl Display) -> TlsError {
        let key = format!("{}.{key}", self.0);
        TlsError { key, path: path.to_owned(), problem: format!("{problem}") }
    }

    fn certificates(
        &self,
        key: &str,
        path: &Path,
    ) -> Result<Vec<CertificateDer<'static>>, TlsError> {
        let pem = self.read(key, path)?;
        let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
        let read = read.map_err(|error| self.error(key, path, format!("is broken: {error}")))?;
        if read.is_empty() {
            return Err(self.error(key, path, "holds no certificate; must be PEM"));
        }
        Ok(read)
    }

    fn key(&self, path: &Path) -> Result<PrivateKeyDer<'static>, TlsError> {
        let pem = self.read("key", path)?;
        PrivateKeyDer::from_pem_slice(&pem)
            .map_err(|error| self.error("key", path, format!("holds no private key: {error}")))
    }

    fn read(&self, key: &str, path: &Path) -> Result<Vec<u8>, TlsError> {
        std::fs::read(path)
            .map_err(|error| self.error(key, path, format!("cannot be read: {error}")))
    }

    fn roots(&self, key: &str, path: &Path) -> Result<RootCertStore, TlsError> {
        let mut roots = RootCertStore::empty();
        for certificate in self.certificates(key, path)? {
            roots
                .add(certificate)
                .map_err(|error| self.error(key, path, format!("is no authority: {error}")))?;
        }
        Ok(roots)
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// What a listener is served with; `section` is its place in the configuration.
pub(crate) fn server(section: &str, tls: &ListenTls) -> Result<Arc<ServerConfig>, TlsError> {
    let files = Files(section);
    let (chain, key) = (files.certificates("certificate", &tls.certificate)?, files.key(&tls.key)?);
    let unfit = |error| files.error("key", &tls.key, unfit(&error, &tls.certificate));
    let builder = ServerConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(unfit)?;
    let builder = match &tls.client_ca {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let roots = Arc::new(files.roots("client_ca", path)?);
            let verifier =
                WebPkiClientVerifier::builder_with_provider(roots, provider()).build().map_err(
                    |error| files.error("client_ca", path, format!("cannot be used: {error}")),
                )?;
            builder.with_client_cert_verifier(verifier)
        }
    };
    let mut config = builder.with_single_cert(chain, key).map_err(unfit)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// What workers with `https://` URLs are reached with.
pub(crate) fn client(tls: &UpstreamTls) -> Result<ClientConfig, TlsError> {
    let files = Files("upstream.tls");
    let (roots, path) = match &tls.ca {
        Some(path) => (files.roots("ca", path)?, path.clone()),
        None => (webpki_roots::TLS_SERVER_ROOTS.iter().cloned().collect(), PathBuf::new()),
    };
    let verifier: Arc<dyn ServerCertVerifier> =
        WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider())
            .build()
            .map_err(|error| files.error("ca", &path, format!("cannot be used: {error}")))?;
    let builder = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(|error| files.error("ca", &path, error))?
        .dangerous()
        .with_custom_certificate_verifier(verifier);
    match &tls.identity {
        None => Ok(builder.with_no_client_auth()),
        Some((certificate, key)) => builder
            .with_client_auth_cert(files.certificates("certificate", certificate)?, files.key(key)?)
            .map_err(|error| files.error("key", key, unfit(&error, certificate))),
    }
}

fn unfit(error: &rustls::Error, certificate: &Path) -> String {
    match error {
        rustls::Error::InconsistentKeys(_) => format!("is not the key of {certificate:?}"),
        _ => format!("cannot be used with {certificate:?}: {error}"),
    }
}

/// The error of TLS within one of a connection, if it is one.
pub(crate) fn within<'e>(error: &'e (dyn StdError + 'static)) -> Option<&'e rustls::Error> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(tls) = error.downcast_ref() {
            return Some(tls);
        }
        // What an `io::Error` holds is not its source, but what that has for one.
        let held = error.downcast_ref::<io::Error>().and_then(io::Error::get_ref);
        if let Some(held) = held {
            next = Some(held);
            continue;
        }
        next = error.source();
    }
    None
}

/// Why a worker cannot be spoken to by TLS, and what to do.
pub(crate) fn told(error: &rustls::Error) -> String {
    use CertificateError as C;
    match error {
        rustls::Error::InvalidCertificate(certificate) => match certificate {
            // An authority that was made anew under its old name has another key.
            C::UnknownIssuer | C::BadSignature => "its certificate is of an unknown authority: name that authority's PEM \
                                 file in `upstream.tls.ca`"
                .to_owned(),
            C::Expired | C::ExpiredContext { .. } => {
                "its certificate has expired: renew it".to_owned()
            }
            C::NotValidYet | C::NotValidYetContext { .. } => {
                "its certificate is not valid yet: look at both clocks".to_owned()
            }
            C::NotValidForName | C::NotValidForNameContext { .. } => {
                "its certificate is for another host: write the worker's `url` with a name that it is for"
                    .to_owned()
            }
            other => format!("its certificate is not accepted: {other}"),
        },
        rustls::Error::InvalidMessage(InvalidMessage::InvalidContentType) => {
            "it does not speak TLS: write its `url` with http://".to_owned()
        }
        rustls::Error::AlertReceived(
            alert @ (AlertDescription::CertificateRequired
            | AlertDescription::BadCertificate
            | AlertDescription::UnknownCA
            | AlertDescription::CertificateExpired
            | AlertDescription::CertificateUnknown
            | AlertDescription::AccessDenied
            | AlertDescription::HandshakeFailure),
        ) => format!(
            "it refuses the router ({alert:?}): give a certificate that it accepts in \
             `upstream.tls.certificate` and `key`"
        ),
        other => format!("TLS with it fails: {other}"),
    }
}
