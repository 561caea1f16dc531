//! Other routers, as people install them from PyPI: `peers.sh` puts each into a venv of its own.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use crate::child::Running;
use crate::cpu::Tree;
use crate::proxies::{Engines, Target, free_port};
use crate::wire::MODEL;

/// How long a request may take that finds out whether one is ready.
const LOOK_WAIT: Duration = Duration::from_secs(2);

/// A router in one of its modes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Peer {
    /// Name of the target.
    pub(crate) name: &'static str,
    /// Its venv and program.
    package: &'static str,
    /// Before the options.
    command: &'static [&'static str],
    policy: &'static str,
    /// What asks for prefill and decode workers; none for ordinary ones.
    pairs: Option<&'static str>,
}

const fn peer(package: &'static str, name: &'static str, policy: &'static str) -> Peer {
    Peer { name, package, command: &["launch"], policy, pairs: None }
}

/// Plain, by what is cached, and with prefill and decode workers.
pub(crate) const PEERS: [Peer; 9] = [
    Peer { command: &[], ..peer("vllm-router", "vllm-router", "round_robin") },
    Peer { command: &[], ..peer("vllm-router", "vllm-router-cache", "cache_aware") },
    Peer {
        command: &[],
        pairs: Some("--vllm-pd-disaggregation"),
        ..peer("vllm-router", "vllm-router-pd", "cache_aware")
    },
    peer("sglang-router", "sglang-router", "round_robin"),
    peer("sglang-router", "sglang-router-cache", "cache_aware"),
    Peer {
        pairs: Some("--pd-disaggregation"),
        ..peer("sglang-router", "sglang-router-pd", "cache_aware")
    },
    peer("smg", "smg", "round_robin"),
    peer("smg", "smg-cache", "cache_aware"),
    Peer { pairs: Some("--pd-disaggregation"), ..peer("smg", "smg-pd", "cache_aware") },
];

impl Peer {
    /// Starts it; none if it is not installed.
    pub(crate) fn start(
        self,
        venvs: &Path,
        engines: Engines,
        core: usize,
        dir: &Path,
    ) -> anyhow::Result<Option<Target>> {
        let program = venvs.join(self.package).join("bin").join(self.package);
        if !program.exists() {
            eprintln!("{} is left out: there is no {}", self.name, program.display());
            return Ok(None);
        }
        let (addr, metrics) = (free_port()?, free_port()?);
        let Engines { prefill, decode } = engines;
        let mut command = Command::new(program);
        command
            .args(self.command)
            .args(["--host", "127.0.0.1", "--port", &addr.port().to_string()])
            .args(["--prometheus-port", &metrics.port().to_string()])
            .args(["--policy", self.policy, "--log-level", "error"]);
        match self.pairs {
            None => command.args(["--worker-urls", &format!("http://{decode}")]),
            Some(pairs) => command
                .arg(pairs)
                .args(["--prefill", &format!("http://{prefill}")])
                .args(["--decode", &format!("http://{decode}")]),
        };
        let mut process = Running::start(self.name, &mut command, &[core], dir)?;
        let id = process.id();
        let ready = || answers(addr).then(|| Tree::of(id).ok()).flatten();
        let (tree, ready) = process.wait_for(ready)?;
        Ok(Some(Target {
            name: self.name,
            addr,
            tree: Some(tree),
            path: None,
            ready: Some(ready),
            process: Some(process),
        }))
    }
}

/// Whether a request gets through.
fn answers(addr: SocketAddr) -> bool {
    let body = format!("{{\"model\":\"{MODEL}\",\"prompt\":\"ready?\",\"max_tokens\":1}}");
    let ask = || {
        let mut stream = TcpStream::connect(addr)?;
        stream.set_read_timeout(Some(LOOK_WAIT))?;
        write!(
            stream,
            "POST /v1/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n\
             content-length: {}\r\nconnection: close\r\n\r\n{body}",
            body.len()
        )?;
        let mut status = [0; "HTTP/1.1 200".len()];
        stream.read_exact(&mut status)?;
        std::io::Result::Ok(status.ends_with(b" 200"))
    };
    ask().unwrap_or(false)
}
