//! The real binary as people run it in a terminal: arguments, environment, what it prints, how it
//! ends.
#![allow(dead_code, unreachable_pub, reason = "each test file uses a part of it")]
#![allow(clippy::expect_used, clippy::panic, reason = "it is all test")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// How long a command may take that is to end by itself.
const PATIENCE: Duration = Duration::from_secs(30);

/// Pause between two looks at whether a process has ended.
const LOOK_PAUSE: Duration = Duration::from_millis(5);

fn command(args: &[&str], env: &[(&str, &str)]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pointsman"));
    // Whatever the environment of the test holds is none of the command's.
    command.args(args).env_clear().envs(env.iter().copied());
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// How a command ended and what it printed.
#[derive(Debug)]
pub struct Ended {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

/// Runs a command that ends by itself.
///
/// # Panics
/// When it does not.
pub fn run(args: &[&str], env: &[(&str, &str)], input: &str) -> Ended {
    let mut child = command(args, env).spawn().expect("the binary starts");
    let mut stdin = child.stdin.take().expect("it is piped");
    // Who does not read it may have ended already.
    let _ = stdin.write_all(input.as_bytes());
    drop(stdin);
    let out = collect(child.stdout.take().expect("it is piped"));
    let err = collect(child.stderr.take().expect("it is piped"));
    let status = ended(&mut child, PATIENCE);
    let text = |of: mpsc::Receiver<String>| of.recv().unwrap_or_default();
    let ended =
        Ended { code: status.and_then(|status| status.code()), out: text(out), err: text(err) };
    assert!(status.is_some(), "{args:?} does not end: {ended:?}");
    ended
}

/// Reads to the end on a thread of its own, so that a full pipe holds nobody up.
fn collect(mut from: impl Read + Send + 'static) -> mpsc::Receiver<String> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut text = Vec::new();
        let _ = from.read_to_end(&mut text);
        let _ = sender.send(String::from_utf8_lossy(&text).into_owned());
    });
    receiver
}

/// Waits for the end; kills and says nothing if it does not come.
fn ended(child: &mut Child, within: Duration) -> Option<ExitStatus> {
    let deadline = Instant::now() + within;
    loop {
        if let Some(status) = child.try_wait().expect("a child") {
            return Some(status);
        }
        if Instant::now() > deadline {
            let _ = child.kill();
            let _ = child.wait();
            return None;
        }
        std::thread::sleep(LOOK_PAUSE);
    }
}

/// A command that goes on until it is told to end. Dropped, it is killed.
pub struct Running {
    child: Child,
    /// What it printed up to its last line of greeting.
    pub greeting: Vec<String>,
    err: mpsc::Receiver<String>,
}

impl Running {
    /// Starts one and reads what it prints up to a line that begins with `last`.
    ///
    /// # Panics
    /// When it ends before.
    pub fn start(args: &[&str], env: &[(&str, &str)], last: &str) -> Running {
        let mut child = command(args, env).spawn().expect("the binary starts");
        let err = collect(child.stderr.take().expect("it is piped"));
        let (sender, lines) = mpsc::channel();
        let out = BufReader::new(child.stdout.take().expect("it is piped"));
        std::thread::spawn(move || {
            out.lines().map_while(Result::ok).for_each(|line| drop(sender.send(line)));
        });
        let mut running = Running { child, greeting: Vec::new(), err };
        while !running.greeting.last().is_some_and(|line| line.trim_start().starts_with(last)) {
            match lines.recv_timeout(PATIENCE) {
                Ok(line) => running.greeting.push(line),
                Err(error) => {
                    let _ = running.child.kill();
                    let log = running.err.recv().unwrap_or_default();
                    panic!("{error}: {args:?} said {:?}\n{log}", running.greeting);
                }
            }
        }
        running
    }

    /// The rest of the line that has these words, up to a blank.
    ///
    /// # Panics
    /// When there is none.
    pub fn told(&self, words: &str) -> &str {
        let line = self.greeting.iter().find_map(|line| line.split_once(words));
        let (_, rest) = line.unwrap_or_else(|| panic!("{words:?} is not in {:?}", self.greeting));
        rest.trim_start().split(' ').next().unwrap_or_default()
    }

    /// The address in a URL that it told.
    pub fn addr(&self, words: &str) -> SocketAddr {
        let told = self.told(words).trim_start_matches("POST ").trim_start_matches("http://");
        let addr = told.split('/').next().and_then(|addr| addr.parse().ok());
        addr.unwrap_or_else(|| panic!("{told:?} is no address"))
    }

    /// Sends it a signal; how it ended, how long that took, and its log.
    ///
    /// # Panics
    /// When it does not end.
    pub fn end(mut self, signal: &str) -> (ExitStatus, Duration, String) {
        let asked = Instant::now();
        self.signal(signal);
        let status = ended(&mut self.child, PATIENCE).expect("it ends when asked");
        let took = asked.elapsed();
        (status, took, self.err.recv().unwrap_or_default())
    }
}

impl Running {
    /// Sends it a signal.
    ///
    /// # Panics
    /// When it has ended.
    pub fn signal(&self, signal: &str) {
        let kill = format!("kill -{signal} {}", self.child.id());
        let sent = Command::new("sh").args(["-c", &kill]).status();
        assert!(sent.is_ok_and(|status| status.success()), "the process is there");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
