//! The KV side channel between mock engines, in place of NIXL's: one JSON line each way to claim a
//! pinned prompt, one to release it. While a claim's connection is open its lease does not end.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::handoff::{Registry, Verdict, Wish};
use super::mooncake;

/// Time that a decode engine tries to reach a prefill engine, as NIXL does.
const REACH: Duration = Duration::from_secs(5);
/// Pause before a prefill engine that is not there is looked for again.
const RECONNECT: Duration = Duration::from_millis(50);
/// Longest line of the protocol.
const LINE_BYTES: u64 = 64 * 1024;

/// Answers one decode engine.
pub(super) async fn serve(registry: Arc<Registry>, stream: TcpStream) {
    let mut claimed = None;
    if let Err(error) = converse(&registry, stream, &mut claimed).await {
        tracing::debug!(%error, "mock engine: side channel");
    }
    if let Some(request) = claimed {
        registry.lost(&request);
    }
}

async fn converse(
    registry: &Registry,
    stream: TcpStream,
    claimed: &mut Option<String>,
) -> io::Result<()> {
    let mut lines = BufReader::new(stream);
    while let Some(wish) = read_line(&mut lines).await? {
        match wish {
            Wish::Claim { engine, request, tokens, digest, last_block } => {
                let verdict = match registry.has_block(last_block) {
                    true => registry.claim(&engine, &request, tokens, digest),
                    false => Verdict::NoSuchBlock,
                };
                if matches!(verdict, Verdict::Granted | Verdict::OtherPrompt { .. }) {
                    *claimed = Some(request);
                }
                write_line(lines.get_mut(), &verdict).await?;
            }
            Wish::Meet { engine, request, tokens, digest } => {
                let verdict = registry.meet(&engine, &request, tokens, digest).await;
                if matches!(verdict, Verdict::Granted | Verdict::OtherPrompt { .. }) {
                    *claimed = Some(request);
                }
                write_line(lines.get_mut(), &verdict).await?;
            }
            Wish::Done { request } => {
                let own = claimed.take_if(|claimed| *claimed == request).is_some();
                registry.done(&request, own);
            }
        }
    }
    Ok(())
}

async fn read_line<T: serde::de::DeserializeOwned>(
    from: &mut BufReader<TcpStream>,
) -> io::Result<Option<T>> {
    let mut line = Vec::new();
    if from.take(LINE_BYTES).read_until(b'\n', &mut line).await? == 0 {
        return Ok(None);
    }
    Ok(Some(serde_json::from_slice(&line)?))
}

async fn write_line<T: serde::Serialize>(to: &mut TcpStream, value: &T) -> io::Result<()> {
    let mut line = serde_json::to_vec(value)?;
    line.push(b'\n');
    to.write_all(&line).await
}

/// Where a prefill engine says its KV is.
#[derive(Clone, Debug)]
pub(super) struct Remote {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) engine: String,
    pub(super) request: String,
    /// The highest of the blocks that are to be pulled.
    pub(super) last_block: u32,
}

/// Engines that have been met, and where they are: what params say of that counts only until
/// then, as in NIXL.
#[derive(Default)]
pub(super) struct Peers(Mutex<HashMap<String, (String, u16)>>);

/// Engines remembered at most; beyond it no further ones are.
const PEERS: usize = 1024;

impl Peers {
    /// Puts the known address of an engine in place of the one told; whether it is known.
    pub(super) fn amend(&self, remote: &mut Remote) -> bool {
        let known = self.lock();
        let Some((host, port)) = known.get(&remote.engine) else { return false };
        (remote.host, remote.port) = (host.clone(), *port);
        true
    }

    /// The same of a remote that tells a bootstrap server, which is asked if need be; false if nobody
    /// knows the engine.
    pub(super) async fn look_up(&self, remote: &mut Remote) -> bool {
        if self.amend(remote) {
            return true;
        }
        match mooncake::find((&remote.host, remote.port), &remote.engine).await {
            Ok(Some(found)) => {
                (remote.host, remote.port) = found;
                true
            }
            Ok(None) | Err(_) => false,
        }
    }

    /// Remembers an engine that was where params had it.
    pub(super) fn met(&self, remote: Remote) {
        let mut known = self.lock();
        // SGLang's rooms tell no engine.
        if !remote.engine.is_empty() && known.len() < PEERS {
            known.insert(remote.engine, (remote.host, remote.port));
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, (String, u16)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A prompt that a prefill engine keeps for us. When it is dropped, pulled or not, the prefill
/// engine is told that it may let go.
pub(super) struct Claim {
    /// Dropping it ends the task that keeps the connection.
    _release: oneshot::Sender<()>,
    lost: oneshot::Receiver<()>,
}

impl Claim {
    /// Ready when the prefill engine is gone.
    pub(super) async fn lost(&mut self) {
        if (&mut self.lost).await.is_err() {
            // Its task was stopped together with this engine.
            std::future::pending::<()>().await;
        }
    }
}

/// Asks for the KV of a prompt. An error when the prefill engine cannot be reached.
pub(super) async fn claim(
    remote: Remote,
    tokens: u32,
    digest: u64,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) -> io::Result<(Verdict, Claim)> {
    let Remote { engine, request, last_block, .. } = remote.clone();
    let wish = Wish::Claim { engine, request, tokens, digest, last_block };
    let (verdict, lines) =
        tokio::time::timeout(REACH, ask((&remote.host, remote.port), &wish)).await??;
    Ok((verdict, kept(lines, remote.request, tasks, stop)))
}

/// Meets the other leg of a request on its prefill engine, whichever comes first. An error when that is
/// not to be within `patience`.
pub(super) async fn meet(
    remote: Remote,
    tokens: u32,
    digest: u64,
    patience: Duration,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) -> io::Result<(Verdict, Claim)> {
    let Remote { engine, request, .. } = remote.clone();
    let wish = Wish::Meet { engine, request, tokens, digest };
    let met = async {
        loop {
            match ask((&remote.host, remote.port), &wish).await {
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                    tokio::time::sleep(RECONNECT).await;
                }
                met => return met,
            }
        }
    };
    let (verdict, lines) = tokio::time::timeout(patience, met).await??;
    Ok((verdict, kept(lines, remote.request, tasks, stop)))
}

fn kept(
    lines: BufReader<TcpStream>,
    request: String,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) -> Claim {
    let (_release, released) = oneshot::channel();
    let (gone, lost) = oneshot::channel();
    let keep = keep(lines, request, released, gone, stop.clone());
    tasks.spawn(stop.clone().run_until_cancelled_owned(keep));
    Claim { _release, lost }
}

async fn ask(addr: (&str, u16), wish: &Wish) -> io::Result<(Verdict, BufReader<TcpStream>)> {
    let mut stream = TcpStream::connect(addr).await?;
    write_line(&mut stream, wish).await?;
    let mut lines = BufReader::new(stream);
    let verdict = read_line(&mut lines).await?;
    Ok((verdict.ok_or(io::ErrorKind::UnexpectedEof)?, lines))
}

async fn keep(
    mut lines: BufReader<TcpStream>,
    request: String,
    released: oneshot::Receiver<()>,
    gone: oneshot::Sender<()>,
    stop: CancellationToken,
) {
    let mut byte = [0];
    tokio::select! {
        _ = released => {
            if stop.is_cancelled() {
                // This engine is going down, as a process that is killed: it says nothing.
                return;
            }
            // If the prefill engine is gone there is nothing left to release.
            let _ = write_line(lines.get_mut(), &Wish::Done { request }).await;
        }
        _ = lines.read(&mut byte) => {
            let _ = gone.send(());
        }
    }
}

/// Tells a prefill engine that nobody will pull, in the background.
/// `asks`: where it is, its bootstrap server knows.
pub(super) fn release(
    mut remote: Remote,
    asks: bool,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) {
    tasks.spawn(stop.clone().run_until_cancelled_owned(async move {
        let tell = async {
            if asks {
                let found = mooncake::find((&remote.host, remote.port), &remote.engine).await?;
                (remote.host, remote.port) = found.ok_or(io::ErrorKind::NotFound)?;
            }
            let mut stream = TcpStream::connect((remote.host.as_str(), remote.port)).await?;
            write_line(&mut stream, &Wish::Done { request: remote.request }).await
        };
        if let Ok(Err(error)) = tokio::time::timeout(REACH, tell).await {
            tracing::debug!(%error, "mock engine: release");
        }
    }));
}
