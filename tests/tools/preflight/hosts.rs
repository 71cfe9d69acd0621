//! Hosts that are network namespaces on one switch, and ranks that are processes there.

use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use nccl::cudarc::driver::CudaContext;
use nccl::preflight::Settings;
use nccl::{Rendezvous, World};

pub(crate) use crate::switch::{Hosts, Interface, Kind};

impl Hosts {
    /// Starts rank `rank` of `size` on a host, given by its number.
    pub(crate) fn start(
        &self,
        host: usize,
        rank: usize,
        size: usize,
        script: &str,
        more: &[(&str, &str)],
    ) -> Child {
        let namespace = self.namespace(host);
        let name = format!(
            "echo h{} > /proc/sys/kernel/hostname; exec \"$@\"",
            host + 1
        );
        let inside = [
            "ip", "netns", "exec", &namespace, "unshare", "--uts", "sh", "-c", &name, "sh",
        ];
        start(&inside, rank, size, script, more)
    }
}

/// Starts a rank through the command `before`.
pub(crate) fn start(
    before: &[&str],
    rank: usize,
    size: usize,
    script: &str,
    more: &[(&str, &str)],
) -> Child {
    let mut command = Command::new("timeout");
    for (name, _) in std::env::vars_os() {
        // Variables of the test's own environment must not reach it.
        if name.to_string_lossy().starts_with("NCCL_") {
            command.env_remove(name);
        }
    }
    command
        .args(["-s", "KILL", "60"])
        .args(before)
        .arg(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "preflight::a_rank",
            "--nocapture",
            "--test-threads=1",
        ])
        .env("NCCL_TEST_SCRIPT", script)
        .env("NCCL_RUN_RANK", rank.to_string())
        .env("NCCL_RUN_WORLD_SIZE", size.to_string())
        .env("NCCL_RUN_SECRET", "hush, and nobody hears it")
        .env("HOME", "/nowhere")
        .envs(more.iter().copied())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a rank")
}

/// The code of a rank: its last line begins with `result:`.
pub(crate) fn a_rank(script: &str) -> Result<String, Box<dyn std::error::Error>> {
    if script == "what a real library takes" {
        return super::real::ask();
    }
    nccl_emulator::install_unless_gpu()?;
    let limit = Duration::from_secs(30);
    let world = World::join(Rendezvous::from_env()?.with(|meet| meet.timeout = limit))?;
    let device =
        std::env::var("NCCL_TEST_DEVICE").map_or(world.rank(), |text| text.parse().unwrap());
    let stream = CudaContext::new(device)?.new_stream()?;
    let mut settings = Settings::default();
    settings.stream = Some(stream.clone());
    settings.library = Some(nccl::Library::load()?);
    if let Ok(files) = std::env::var("NCCL_TEST_FILES_LEFT") {
        use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
        let used = std::fs::read_dir("/proc/self/fd")?.count() as u64;
        let limit = getrlimit(Resource::Nofile);
        let current = Some(used + files.parse::<u64>()?);
        setrlimit(Resource::Nofile, Rlimit { current, ..limit })?;
    }
    // All begin together, so that the time is that of the check.
    world.barrier("start")?;
    let begun = Instant::now();
    let text = match script {
        "check" => world.preflight(&settings)?.to_string(),
        "late" => {
            drop(world.communicator("model").stream(&stream).build()?);
            let file = std::env::var("NCCL_CONF_FILE")?;
            world.barrier("built")?;
            if world.rank() == 0 {
                std::fs::write(file, "NCCL_ALGO=Tree\n")?;
            }
            // The facts of a process are cached for a moment.
            std::thread::sleep(Duration::from_millis(200));
            world.barrier("written")?;
            world.preflight(&settings)?.to_string()
        }
        "build" => match world.communicator("model").stream(&stream).build() {
            Ok(_) => String::from("built"),
            Err(error) => format!("{error:#}"),
        },
        other => panic!("{other}"),
    };
    println!("took: {}", begun.elapsed().as_millis());
    world.barrier("end")?;
    Ok(text.replace('\n', " | "))
}

/// The report of a rank, and how long its check took.
pub(crate) struct Said {
    pub(crate) text: String,
    pub(crate) took: Duration,
}

/// The reports of all ranks.
pub(crate) fn said(ranks: Vec<Child>) -> Vec<Said> {
    let line = |output: &Output, name: &str| {
        let text = String::from_utf8_lossy(&output.stdout);
        let found = text.lines().find_map(|line| line.split_once(name));
        let found = found.map(|(_, rest)| rest.trim().to_owned());
        found.unwrap_or_else(|| {
            panic!(
                "no {name} in {text}{}",
                String::from_utf8_lossy(&output.stderr)
            )
        })
    };
    let said: Vec<_> = ranks
        .into_iter()
        .map(|rank| {
            let output = rank.wait_with_output().expect("its output");
            Said {
                text: line(&output, "result:"),
                took: Duration::from_millis(line(&output, "took:").parse().unwrap()),
            }
        })
        .collect();
    // The quotes of docs/start-up-faults.md: `--nocapture` shows them.
    for (rank, Said { text, took }) in said.iter().enumerate() {
        println!("rank {rank} after {took:?}:");
        text.split(" | ").for_each(|line| println!("    {line}"));
    }
    said
}

/// The report that all ranks made, in time.
#[track_caller]
pub(crate) fn agreed(ranks: Vec<Child>) -> String {
    let all = said(ranks);
    for other in &all {
        assert_eq!(other.text, all[0].text, "all ranks say the same");
        assert!(
            other.took < Duration::from_secs(8),
            "{:?}: {}",
            other.took,
            other.text
        );
    }
    all.into_iter().next().expect("a rank").text
}

#[track_caller]
pub(crate) fn contains(text: &str, words: &[&str]) {
    for word in words {
        assert!(
            text.contains(word),
            "{word:?} in {:#?}",
            text.split(" | ").collect::<Vec<_>>()
        );
    }
}
