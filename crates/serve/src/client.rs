//! Asking a running router, for the commands that do.

use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use http::Uri;
use pointsman_brain::Cause;
use pointsman_config::{Secret, UpstreamTls};

use crate::headers;
use crate::tls::{self, TlsError};
use crate::upstream::{Upstream, read};

/// How long the router may take to answer.
const WAIT: Duration = Duration::from_secs(30);

/// Bytes of its answer that are read.
const REPLY_BYTES: usize = 16 * 1024 * 1024;

/// Why a router gave no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The URL is none.
    #[error("`{0}` is not a URL such as http://127.0.0.1:8000")]
    Url(String),
    /// TLS cannot be used.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// TLS with it failed.
    #[error("the router at {url} cannot be reached by TLS: {trouble}")]
    Trust {
        /// The router.
        url: String,
        /// Why, and what to do.
        trouble: String,
    },
    /// It could not be asked.
    #[error("the router at {url} {cause}")]
    Failed {
        /// The router.
        url: String,
        /// What happened.
        cause: Cause,
    },
}

/// Where a router is, and how it is spoken to.
#[derive(Debug)]
pub struct Target<'a> {
    /// Its URL.
    pub url: &'a str,
    /// The key that it asks for.
    pub key: Option<Secret>,
    /// The authorities of its certificate; `None` = the public ones.
    pub ca: Option<PathBuf>,
}

/// What a router would decide for a request body: status and JSON.
pub async fn explain(to: Target<'_>, body: Vec<u8>) -> Result<(u16, Bytes), ClientError> {
    let Target { url, key, ca } = to;
    let uri: Uri = format!("{}/v1/pointsman/explain", url.trim_end_matches('/'))
        .parse()
        .map_err(|_| ClientError::Url(url.to_owned()))?;
    if !matches!(uri.scheme_str(), Some("http" | "https")) || uri.authority().is_none() {
        return Err(ClientError::Url(url.to_owned()));
    }
    let failed = |cause| ClientError::Failed { url: url.to_owned(), cause };
    let trust = tls::client(&UpstreamTls { ca, identity: None })?;
    let upstream = Upstream::new(0, Duration::from_secs(1), WAIT, trust);
    let head = headers::bearing(key.as_ref());
    let answer = upstream.post(uri.clone(), head, Bytes::from(body), WAIT).await;
    let response = answer.map_err(|cause| match upstream.trouble(&uri) {
        // What names the authorities here is another thing than of a worker.
        Some(trouble) => {
            let trouble = trouble.replace("`upstream.tls.ca`", "`--ca`");
            ClientError::Trust { url: url.to_owned(), trouble }
        }
        None => failed(cause),
    })?;
    let status = response.status().as_u16();
    let body = read(response.into_body(), REPLY_BYTES).await.map_err(failed)?;
    Ok((status, body))
}
