//! Asking a running router, for the commands that do.

use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Uri};
use pointsman_brain::Cause;
use pointsman_config::UpstreamTls;

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
    /// It could not be asked.
    #[error("the router at {url} {cause}")]
    Failed {
        /// The router.
        url: String,
        /// What happened.
        cause: Cause,
    },
}

/// What the router at `url` would decide for a request body: status and JSON.
pub async fn explain(url: &str, body: Vec<u8>) -> Result<(u16, Bytes), ClientError> {
    let uri: Uri = format!("{}/v1/pointsman/explain", url.trim_end_matches('/'))
        .parse()
        .map_err(|_| ClientError::Url(url.to_owned()))?;
    if !matches!(uri.scheme_str(), Some("http" | "https")) || uri.authority().is_none() {
        return Err(ClientError::Url(url.to_owned()));
    }
    let failed = |cause| ClientError::Failed { url: url.to_owned(), cause };
    let upstream =
        Upstream::new(0, Duration::from_secs(1), WAIT, tls::client(&UpstreamTls::default())?);
    let response =
        upstream.post(uri, HeaderMap::new(), Bytes::from(body), WAIT).await.map_err(failed)?;
    let status = response.status().as_u16();
    let body = read(response.into_body(), REPLY_BYTES).await.map_err(failed)?;
    Ok((status, body))
}
