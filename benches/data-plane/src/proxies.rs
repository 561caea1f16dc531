//! What stands between load and engines: nothing, nginx, or the router in several configurations.
//!
//! A further router is a further function here that gives a `Target`.

use std::fs;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::Context;

use crate::child::Running;
use crate::cpu::Tree;
use crate::wire::MODEL;

/// Where the engines answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Engines {
    pub(crate) prefill: SocketAddr,
    pub(crate) decode: SocketAddr,
}

/// One way from the load to the engines.
#[derive(Debug)]
pub(crate) struct Target {
    /// Column of the tables.
    pub(crate) name: &'static str,
    pub(crate) addr: SocketAddr,
    /// The processes whose CPU time counts; none for a direct connection.
    pub(crate) tree: Option<Tree>,
    /// `x-pointsman-path` of its replies.
    pub(crate) path: Option<&'static str>,
    /// From the start of the process to its readiness.
    pub(crate) ready: Option<Duration>,
    /// Held for its end.
    pub(crate) process: Option<Running>,
}

/// The name of the direct connection.
pub(crate) const DIRECT: &str = "direct";
/// The name of what the others are compared with.
pub(crate) const NGINX: &str = "nginx";

/// Starts the engines.
pub(crate) fn engines(core: usize, dir: &Path) -> anyhow::Result<(Running, Engines)> {
    let (process, addrs) = many_engines(2, &[core], dir)?;
    let [prefill, decode] = addrs[..] else { anyhow::bail!("the engines told too few ports") };
    Ok((process, Engines { prefill, decode }))
}

/// Starts so many engines in one process.
pub(crate) fn many_engines(
    count: usize,
    cores: &[usize],
    dir: &Path,
) -> anyhow::Result<(Running, Vec<SocketAddr>)> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["engine", "--ports", &count.to_string()]);
    let mut process = Running::start("engines", &mut command, cores, dir)?;
    let (ports, _) = process.line("ready ")?;
    let addrs = ports.trim().split(' ').map(|port| Ok(local(port.parse()?)));
    Ok((process, addrs.collect::<anyhow::Result<_>>()?))
}

/// The engines themselves.
pub(crate) fn direct(engines: Engines) -> Target {
    Target {
        name: DIRECT,
        addr: engines.decode,
        tree: None,
        path: None,
        ready: None,
        process: None,
    }
}

/// nginx as a plain proxy with one worker.
pub(crate) fn nginx(
    program: &Path,
    engines: Engines,
    core: usize,
    dir: &Path,
) -> anyhow::Result<Target> {
    let home = dir.join(NGINX);
    fs::create_dir(&home)?;
    let addr = free_port()?;
    let conf = home.join("nginx.conf");
    fs::write(&conf, nginx_conf(addr, engines.decode))?;
    let mut command = Command::new(program);
    command.arg("-p").arg(&home).arg("-c").arg(&conf).args(["-e", "stderr"]);
    let mut process = Running::start(NGINX, &mut command, &[core], dir)?;
    let id = process.id();
    // It listens before it has its worker.
    let (tree, ready) = process.wait_for(|| {
        let tree = Tree::of(id).ok().filter(|tree| tree.pids().len() == 2)?;
        TcpStream::connect(addr).ok().map(|_| tree)
    })?;
    Ok(Target {
        name: NGINX,
        addr,
        tree: Some(tree),
        path: None,
        ready: Some(ready),
        process: Some(process),
    })
}

/// Bodies of 32 KiB stay in memory, replies are passed on as they come, and no connection is given
/// up during the run.
fn nginx_conf(listen: SocketAddr, engine: SocketAddr) -> String {
    format!(
        "daemon off;
worker_processes 1;
pid nginx.pid;
error_log stderr error;
events {{ worker_connections 8192; }}
http {{
    access_log off;
    tcp_nodelay on;
    keepalive_timeout 600s;
    keepalive_requests 1000000000;
    client_max_body_size 64m;
    client_body_buffer_size 128k;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    upstream engine {{
        server {engine};
        keepalive 1024;
        keepalive_requests 1000000000;
        keepalive_timeout 600s;
    }}
    server {{
        listen {listen} backlog=4096;
        location / {{
            proxy_pass http://engine;
            proxy_http_version 1.1;
            proxy_set_header Connection \"\";
            proxy_buffering off;
        }}
    }}
}}
"
    )
}

/// Starts `pointsman serve` with this configuration.
pub(crate) fn router(
    name: &'static str,
    command: &mut Command,
    config: &str,
    cores: &[usize],
    dir: &Path,
) -> anyhow::Result<Target> {
    let file = dir.join(format!("{name}.yaml"));
    fs::write(&file, config)?;
    command.arg("serve").arg("-c").arg(&file);
    let mut process = Running::start(name, command, cores, dir)?;
    let (url, ready) = process.line("pointsman is ready on http://")?;
    Ok(Target {
        name,
        addr: url.trim().parse().context("the router's address")?,
        tree: Some(process.tree()?),
        path: None,
        ready: Some(ready),
        process: Some(process),
    })
}

/// How a router is set up.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    /// Name of the target.
    pub(crate) name: &'static str,
    policy: &'static str,
    tokenizer: &'static str,
    path: &'static str,
}

/// The router's variants, the plain one first.
pub(crate) const SETUPS: [Setup; 3] = [
    Setup {
        name: "local",
        policy: "always_local",
        tokenizer: "{bytes_per_token: 4}",
        path: "local",
    },
    Setup {
        name: "remote",
        policy: "always_remote",
        tokenizer: "{bytes_per_token: 4}",
        path: "remote",
    },
    Setup { name: "local-tokenised", policy: "always_local", tokenizer: "builtin", path: "local" },
];

impl Setup {
    /// Starts `pointsman serve`.
    pub(crate) fn start(
        self,
        program: &Path,
        engines: Engines,
        core: usize,
        dir: &Path,
    ) -> anyhow::Result<Target> {
        let mut command = Command::new(program);
        let target = router(self.name, &mut command, &self.config(engines), &[core], dir)?;
        Ok(Target { path: Some(self.path), ..target })
    }

    fn config(self, engines: Engines) -> String {
        let Engines { prefill, decode } = engines;
        let workers = match self.path {
            "remote" => format!(
                "      - {{name: p0, role: prefill, url: \"http://{prefill}\"}}
      - {{name: d0, role: decode, url: \"http://{decode}\"}}"
            ),
            _ => format!("      - {{name: u0, role: unified, url: \"http://{decode}\"}}"),
        };
        format!(
            "listen: {{port: 0}}
models:
  - name: {MODEL}
    tokenizer: {}
    workers:
{workers}
routing:
  policy: {}
shutdown: {{grace: 1s}}
",
            self.tokenizer, self.policy
        )
    }
}

fn local(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

/// A port that was free a moment ago, for programs that cannot choose one themselves.
pub(crate) fn free_port() -> anyhow::Result<SocketAddr> {
    Ok(TcpListener::bind(local(0))?.local_addr()?)
}
