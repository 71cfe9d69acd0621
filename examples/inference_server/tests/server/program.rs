//! The server's process, and the system's view of its ranks.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpStream;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::client::get;
use crate::{DEADLINE, until};

/// A server; killed at the end of the test, with all of its ranks.
pub(crate) struct Server {
    child: Child,
    pub(crate) url: String,
    said: Arc<Mutex<Vec<String>>>,
    /// Whether the server's output is no longer read.
    unheard: Arc<AtomicBool>,
}

pub(crate) fn command(arguments: &[&str]) -> Command {
    for_gpus(&[&["--emulator"], arguments].concat())
}

/// Does what [`command`] does, for a server that is to end if there is no GPU.
pub(crate) fn for_gpus(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_inference-server"));
    command.args(arguments).stdin(Stdio::null());
    command.stdout(Stdio::null()).stderr(Stdio::piped());
    command
}

/// Runs a server that ends by itself; returns its exit code and its output.
pub(crate) fn ends(mut command: Command) -> (Option<i32>, String) {
    let mut child = command.spawn().unwrap();
    let mut stderr = child.stderr.take().unwrap();
    let reading = std::thread::spawn(move || {
        let mut text = Vec::new();
        stderr.read_to_end(&mut text).map(|_| text)
    });
    // Killed on drop, if that takes too long.
    let mut server = Server {
        child,
        url: String::new(),
        said: Arc::default(),
        unheard: Arc::default(),
    };
    let status = server.until_ended();
    let text = reading.join().unwrap().unwrap();
    (status.code(), String::from_utf8_lossy(&text).into_owned())
}

impl Server {
    /// Starts a server on a free port, and waits until it is ready.
    pub(crate) fn start(arguments: &[&str]) -> Self {
        Self::start_with_faults(arguments, "")
    }

    /// Does what [`start`](Self::start) does, with faults of the emulator ([`nccl_emulator::faults`]) in all rank processes.
    pub(crate) fn start_with_faults(arguments: &[&str], faults: &str) -> Self {
        let words = [arguments, &["--listen", "127.0.0.1:0"]].concat();
        let mut command = command(&words);
        command.env("NCCL_EMULATOR_FAULTS", faults);
        Self::begin_and_wait(command)
    }

    /// Does what [`start`](Self::start) does, with processes that return freed memory to the system, so that their memory is
    /// what they use. By default glibc keeps freed memory, in an arena for each thread that has ever allocated.
    pub(crate) fn start_thrifty(arguments: &[&str]) -> Self {
        let words = [arguments, &["--listen", "127.0.0.1:0"]].concat();
        let mut command = command(&words);
        command.envs([
            ("MALLOC_ARENA_MAX", "1"),
            ("MALLOC_MMAP_THRESHOLD_", "32768"),
            ("MALLOC_TRIM_THRESHOLD_", "65536"),
        ]);
        Self::begin_and_wait(command)
    }

    fn begin_and_wait(command: Command) -> Self {
        let server = Self::begin(command);
        server.until_ready();
        server
    }

    /// Starts a server, and waits until it prints its address.
    pub(crate) fn begin(mut command: Command) -> Self {
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let said = Arc::new(Mutex::new(Vec::new()));
        let saying = Arc::clone(&said);
        let unheard = Arc::new(AtomicBool::new(false));
        let is_unheard = Arc::clone(&unheard);
        std::thread::spawn(move || {
            let heard = |_: &String| !is_unheard.load(Ordering::Relaxed);
            for line in lines.map_while(Result::ok).take_while(heard) {
                println!("    {line}");
                saying.lock().unwrap().push(line);
            }
        });
        let mut server = Self {
            child,
            url: String::new(),
            said,
            unheard,
        };
        server.url = until("an address", || {
            let said = server.said.lock().unwrap();
            let line = said.iter().find_map(|line| line.split("http://").nth(1))?;
            Some(format!("http://{line}"))
        });
        server
    }

    pub(crate) fn until_ready(&self) {
        until("ready", || {
            (get(&format!("{}/readyz", self.url)).status == 200).then_some(())
        });
    }

    /// Closes the read end of the server's pipe when the next line arrives, which is dropped.
    pub(crate) fn stop_listening(&self) {
        self.unheard.store(true, Ordering::Relaxed);
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn health(&self) -> Value {
        get(&format!("{}/health", self.url)).json()
    }

    /// Returns the processes of the ranks.
    pub(crate) fn ranks(&self) -> Vec<u32> {
        let health = self.health();
        let ranks = health["ranks"].as_array().unwrap();
        let pid = |rank: &Value| rank["pid"].as_u64().unwrap_or(0) as u32;
        ranks.iter().map(pid).collect()
    }

    /// Returns the processes that the server has started.
    pub(crate) fn children(&self) -> BTreeSet<u32> {
        let mut children = BTreeSet::new();
        for thread in std::fs::read_dir(format!("/proc/{}/task", self.pid())).unwrap() {
            // The thread may have ended.
            let text = std::fs::read_to_string(thread.unwrap().path().join("children"));
            let text = text.unwrap_or_default();
            children.extend(
                text.split_whitespace()
                    .map(|pid| pid.parse::<u32>().unwrap()),
            );
        }
        children
    }

    /// Opens a connection to the server, on which nothing has been sent.
    pub(crate) fn connect(&self) -> TcpStream {
        let address = self.url.strip_prefix("http://").unwrap();
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream
    }

    /// Returns the files that one of its processes has mapped.
    pub(crate) fn maps(pid: u32) -> String {
        std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap()
    }

    pub(crate) fn threads(&self) -> usize {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.pid()));
        threads.unwrap().count()
    }

    /// Returns the CPU time of its own process.
    pub(crate) fn cpu_seconds(&self) -> f64 {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.pid())).unwrap();
        let (_, numbers) = stat.rsplit_once(')').unwrap();
        let ticks = numbers.split_whitespace().skip(11).take(2);
        let ticks: f64 = ticks.map(|ticks| ticks.parse::<f64>().unwrap()).sum();
        // The kernel counts hundredths for programs, whatever it counts for itself.
        ticks / 100.0
    }

    /// Returns a value of `/metrics`.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        let text = get(&format!("{}/metrics", self.url)).text;
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        let line = line.unwrap_or_else(|| panic!("no {name} in {text}"));
        line.trim().parse().unwrap()
    }

    /// Returns the number of lines that it has printed.
    pub(crate) fn lines(&self) -> usize {
        self.said.lock().unwrap().len()
    }

    /// Returns how the process itself ended.
    pub(crate) fn until_ended(&mut self) -> ExitStatus {
        until("the end of the server", || self.child.try_wait().unwrap())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Its ranks end with it, as another test shows.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(crate) fn signal(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(pid.try_into().unwrap()).unwrap();
    kill_process(pid, signal).unwrap();
}

/// Whether the process exists and is no zombie.
pub(crate) fn lives(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let state = stat.rsplit_once(')').map(|(_, rest)| rest.trim_start());
    state.is_some_and(|state| !state.starts_with(['Z', 'X']))
}
