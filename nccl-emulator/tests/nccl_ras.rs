//! The RAS service of the emulator's NCCL: its answers to clients about the ranks of a job.

mod ranks;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::process::ExitStatusExt as _;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use nccl_sys::{ncclDataType_t as Kind, ncclRedOp_t as Op};
use ranks::{
    Process, Rank, alone, is_child_of, nccl, processes, processes_ending, unique_id, wait_until,
};
use serde_json::Value;

/// The addresses at which the processes listen: the last digit of a port is the rank.
fn addresses(test: u16) -> String {
    let base = 1100 + (std::process::id() as u16).wrapping_mul(16) % 2000 + test;
    format!("127.0.0.1:{base}{{rank}}")
}

fn own_address() -> String {
    std::env::var("NCCL_RAS_ADDR").unwrap()
}

/// The address of another process of the test.
fn address_of(rank: i32) -> String {
    let own = own_address();
    format!("{}{rank}", &own[..own.len() - 1])
}

/// A client.
struct Client(BufReader<TcpStream>);

impl Client {
    fn connect(address: &str) -> Self {
        let stream = TcpStream::connect(address).unwrap();
        let limit = Some(Duration::from_secs(20));
        stream.set_read_timeout(limit).unwrap();
        Self(BufReader::new(stream))
    }

    fn say(&mut self, line: &str) {
        let text = format!("{line}\n");
        self.0.get_ref().write_all(text.as_bytes()).unwrap();
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    fn ask(&mut self, line: &str) -> String {
        self.say(line);
        self.line()
    }

    fn rest(mut self) -> String {
        let mut text = String::new();
        self.0.read_to_string(&mut text).unwrap();
        text
    }
}

fn json(address: &str) -> Value {
    let mut client = Client::connect(address);
    assert_eq!(client.ask("CLIENT PROTOCOL 2"), "SERVER PROTOCOL 2");
    assert_eq!(client.ask("SET FORMAT json"), "OK");
    client.say("STATUS");
    let text = client.rest();
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn text(address: &str, verbose: bool) -> String {
    let mut client = Client::connect(address);
    client.say(if verbose { "verbose status" } else { "status" });
    client.rest()
}

/// Queries the service until the answer satisfies `wanted`.
fn json_until(what: &str, address: &str, wanted: impl Fn(&Value) -> bool) -> Value {
    let mut answer = Value::Null;
    wait_until(what, || {
        std::thread::sleep(Duration::from_millis(10));
        answer = json(address);
        wanted(&answer)
    });
    answer
}

/// The only communicator.
fn communicator(answer: &Value) -> &Value {
    assert_eq!(answer["communicators_count"], 1, "{answer:#}");
    &answer["communicators"][0]
}

fn missing(answer: &Value) -> Vec<i64> {
    let missing = answer["communicators"][0]["missing_ranks"].as_array();
    let missing = missing.map_or(&[][..], |ranks| ranks);
    let ranks = missing.iter().map(|rank| rank["rank"].as_i64().unwrap());
    ranks.collect()
}

fn sum(rank: &Rank, times: usize) {
    let memory = rank.memory(&[1f32; 10]);
    for _ in 0..times {
        let code = rank.all_reduce(&memory, &memory, Kind::ncclFloat32, Op::ncclSum);
        assert_eq!(code, 0);
    }
}

/// Waits until all processes have come to a point.
fn meet(process: &Process, point: &str) {
    process.mark(&format!("{point}.{}", process.rank));
    (0..process.ranks).for_each(|rank| process.wait_for(&format!("{point}.{rank}")));
}

#[test]
fn each_process_answers_for_all_ranks() {
    let name = "each_process_answers_for_all_ranks";
    let addresses = addresses(0);
    let environment = [
        ("NCCL_RAS_ADDR", addresses.as_str()),
        ("NCCL_HOSTID", "{rank}"),
    ];
    processes(name, 3, &environment, |process| {
        let rank = process.join();
        sum(&rank, 2);
        rank.sync();
        if rank.rank != 1 {
            sum(&rank, 1);
        }
        meet(&process, "called");
        let gather = rank.memory(&[0f32; 3]);
        for asked in 0..3 {
            let answer = json_until("all answer", &address_of(asked), |answer| {
                missing(answer).is_empty()
            });
            assert_eq!(answer["nccl_version"], "2.32.3+cuda13.0");
            let communicator = communicator(&answer);
            assert_eq!(communicator["size"], 3);
            let ranks = communicator["ranks"].as_array().unwrap();
            assert_eq!(ranks.len(), 3);
            let hosts: std::collections::BTreeSet<_> =
                ranks.iter().map(|rank| rank["host"].as_str()).collect();
            assert_eq!(hosts.len(), 3);
            for (at, one) in ranks.iter().enumerate() {
                assert_eq!(one["rank"], at);
                assert_eq!(one["cuda_dev"], at);
                let counts = &one["collective_counts"];
                assert_eq!(counts["AllReduce"], if at == 1 { 2 } else { 3 });
                assert_eq!(counts["Broadcast"], 0);
                for (name, value) in one["status"].as_object().unwrap() {
                    assert!(*value == 0 || *value == false, "{name}: {value}");
                }
            }
            let own = &ranks[rank.rank as usize];
            assert_eq!(own["pid"], std::process::id());
            let said = text(&address_of(asked), false);
            for part in [
                "NCCL version 2.32.3",
                "      3          1            1          3        3\n",
                "    0         1         3         1         3         3   RUNNING  MISMATCH\n",
                "Communicator ranks have different AllReduce operation counts\n  2 ranks have launched up to operation 3\n",
                "  Rank 1 has launched up to operation 2 -- GPU 1 managed by process ",
            ] {
                assert!(said.contains(part), "{part} is not in {said}");
            }
        }
        meet(&process, "asked");
        if rank.rank == 1 {
            sum(&rank, 1);
        }
        rank.sync();
        assert_eq!(gather.read(), [0.; 3]);
        meet(&process, "done");
        rank.destroy();
    });
}

#[test]
fn a_process_knows_of_communicators_that_it_has_no_rank_of() {
    let name = "a_process_knows_of_communicators_that_it_has_no_rank_of";
    let addresses = addresses(1);
    let environment = [
        ("NCCL_RAS_ADDR", addresses.as_str()),
        ("NCCL_EMULATOR_RAS_SECOND_MS", "50"),
    ];
    processes(name, 3, &environment, |process| {
        let mut mine = Vec::new();
        for pair in [[0, 1], [1, 2]] {
            let place = pair.iter().position(|&rank| rank == process.rank);
            let id = format!("id.{}", pair[0]);
            match place {
                Some(0) => {
                    let made = unique_id();
                    process.put_id(&id, &made);
                    mine.push(Rank::join(made, 2, 0));
                }
                Some(place) => mine.push(Rank::join(process.get_id(&id), 2, place as i32)),
                None => {}
            }
        }
        let answer = json_until("it knows both", &own_address(), |answer| {
            let all = answer["communicators"].as_array().unwrap();
            all.len() == 2 && all.iter().all(|one| one["ranks_count"] == 2)
        });
        assert_eq!(answer["communicators_count"], 2);
        let said = text(&own_address(), true);
        assert!(
            said.contains(
                "    0         2         1         2         2         4   RUNNING      OK\n"
            ),
            "{said}"
        );
        meet(&process, "asked");
        mine.into_iter().for_each(Rank::destroy);
    });
}

#[test]
fn a_communicator_shows_how_far_its_end_is_and_is_gone_afterwards() {
    let name = "a_communicator_shows_how_far_its_end_is_and_is_gone_afterwards";
    let addresses = addresses(2);
    processes(name, 2, &[("NCCL_RAS_ADDR", &addresses)], |process| {
        let rank = process.join();
        let status = |of: usize, flag: &str| {
            json(&own_address())["communicators"][0]["ranks"][of]["status"][flag].clone()
        };
        assert_eq!(status(0, "finalize_called"), false);
        meet(&process, "joined");
        std::thread::scope(|scope| {
            if rank.rank == 0 {
                let comm = rank.comm.addr();
                scope.spawn(move || {
                    let comm = std::ptr::with_exposed_provenance_mut(comm);
                    assert_eq!(nccl!(ncclCommFinalize(comm)), 0);
                });
            }
            wait_until("finalize was called", || {
                status(0, "finalize_called") == true
            });
            let said = text(&own_address(), true);
            assert!(said.contains("FINALIZE  MISMATCH"), "{said}");
            assert!(
                said.contains("  Rank 1 has status RUNNING -- GPU 1 managed"),
                "{said}"
            );
            meet(&process, "seen");
            if rank.rank == 1 {
                assert_eq!(nccl!(ncclCommFinalize(rank.comm)), 0);
            }
        });
        meet(&process, "finalized");
        rank.destroy();
        meet(&process, "destroyed");
        let answer = json(&own_address());
        assert_eq!(answer["communicators_count"], 0);
        let said = text(&own_address(), false);
        assert!(said.contains("No communicator data collected!"), "{said}");
        meet(&process, "asked");
    });
}

fn signal(pid: i64, signal: i32) {
    // SAFETY: sends a signal to a process of this test.
    assert_eq!(unsafe { libc::kill(pid as i32, signal) }, 0);
}

fn pid_of(answer: &Value, rank: usize) -> i64 {
    communicator(answer)["ranks"][rank]["pid"].as_i64().unwrap()
}

fn rank_2_is_killed(rank: i32, status: ExitStatus) -> bool {
    match rank {
        2 => status.signal() == Some(libc::SIGKILL),
        _ => status.success(),
    }
}

#[test]
fn a_stopped_process_is_unresponsive_until_it_goes_on_and_dead_after_a_minute() {
    let name = "a_stopped_process_is_unresponsive_until_it_goes_on_and_dead_after_a_minute";
    let addresses = addresses(3);
    let environment = [
        ("NCCL_RAS_ADDR", addresses.as_str()),
        ("NCCL_EMULATOR_RAS_SECOND_MS", "100"),
    ];
    processes_ending(name, 3, &environment, rank_2_is_killed, |process| {
        let rank = process.join();
        let own = own_address();
        let answer = json_until("all answer", &own, |answer| missing(answer).is_empty());
        meet(&process, "joined");
        if rank.rank == 0 {
            let pid = pid_of(&answer, 2);
            let mut monitor = Client::connect(&own);
            assert_eq!(monitor.ask("MONITOR all"), "OK");
            // Repeats until a query precedes the report of the silence: a busy machine may report it first, or be late itself.
            let mut answer = Value::Null;
            wait_until("a query waited for it in vain, and for it alone", || {
                signal(pid, libc::SIGSTOP);
                let mut client = Client::connect(&own);
                assert_eq!(client.ask("TIMEOUT 3"), "OK");
                client.say("SET FORMAT json");
                let asked = Instant::now();
                client.say("STATUS");
                assert_eq!(client.line(), "OK");
                answer = serde_json::from_str(&client.rest()).unwrap();
                if answer["ras"]["timeouts_count"] == 1 && missing(&answer) == [2] {
                    assert!(asked.elapsed() >= Duration::from_millis(200));
                    return true;
                }
                signal(pid, libc::SIGCONT);
                json_until("it answers again", &own, |answer| {
                    missing(answer).is_empty()
                });
                false
            });
            let lost = &communicator(&answer)["missing_ranks"][0];
            assert_eq!((&lost["rank"], &lost["pid"]), (&2.into(), &pid.into()));
            assert_eq!(lost["status"]["unresponsive"], true);
            assert_eq!(lost["status"]["considered_dead"], false);
            // The silence is known by now, and no query waits for the rank.
            let answer = json_until("only it is missing", &own, |answer| {
                answer["ras"]["timeouts_count"] == 0 && missing(answer) == [2]
            });
            assert_eq!(missing(&answer), [2]);
            let said = text(&own, false);
            let incomplete = format!(
                "INCOMPLETE\n  Missing communicator data from 1 job process\n  Process {pid} on node 127.0.0.1 managing GPU 2\n"
            );
            assert!(said.contains(&incomplete), "{said}");
            assert!(said.contains("RUNNING  INCOMPLETE"), "{said}");
            assert!(
                said.contains(&format!(
                    "  Rank 2 -- GPU 2 managed by process {pid} on node"
                )),
                "{said}"
            );

            signal(pid, libc::SIGCONT);
            json_until("it goes on", &own, |answer| missing(answer).is_empty());

            signal(pid, libc::SIGSTOP);
            for asked in [0, 1] {
                let answer = json_until("it is dead", &address_of(asked), |answer| {
                    let missing = &answer["communicators"][0]["missing_ranks"];
                    missing[0]["status"]["considered_dead"] == true
                });
                assert_eq!(missing(&answer), [2]);
            }
            let said = text(&own, false);
            assert!(
                said.contains("DEAD\n  1 job process is considered dead"),
                "{said}"
            );
            let mut lines = Vec::new();
            while !lines.iter().any(|line: &String| line.contains("PEER_DEAD")) {
                lines.push(monitor.line());
            }
            let process_2 = format!("Process {pid} on node 127.0.0.1 managing GPU 2");
            let of = |event: &str| {
                lines
                    .iter()
                    .any(|line| line.contains(&format!("] {event}: {process_2}")))
            };
            assert!(
                of("PEER_UNRESPONSIVE") && of("PEER_RECOVERED") && of("PEER_DEAD"),
                "{lines:?}"
            );
            signal(pid, libc::SIGKILL);
            process.mark("over");
        }
        process.wait_for("over");
        assert_eq!(rank.abort(), 0);
    });
}

#[test]
fn a_killed_process_is_missing_at_once() {
    let name = "a_killed_process_is_missing_at_once";
    let addresses = addresses(4);
    processes_ending(
        name,
        3,
        &[("NCCL_RAS_ADDR", &addresses)],
        rank_2_is_killed,
        |process| {
            let rank = process.join();
            let own = own_address();
            let answer = json_until("all answer", &own, |answer| missing(answer).is_empty());
            meet(&process, "joined");
            if rank.rank == 0 {
                signal(pid_of(&answer, 2), libc::SIGKILL);
                let asked = Instant::now();
                let answer = json_until("it is missing", &own, |answer| missing(answer) == [2]);
                assert!(asked.elapsed() < Duration::from_secs(4));
                let status = &communicator(&answer)["missing_ranks"][0]["status"];
                assert_eq!(status["unresponsive"], true);
                assert_eq!(status["considered_dead"], false);
                assert_eq!(answer["ras"]["timeouts_count"], 0);
                process.mark("over");
            } else if rank.rank == 1 {
                process.wait_for("over");
            } else {
                std::thread::sleep(Duration::from_secs(60));
            }
            assert_eq!(rank.abort(), 0);
        },
    );
}

#[test]
fn each_release_has_the_commands_that_it_had() {
    let name = "each_release_has_the_commands_that_it_had";
    let releases = [
        ("2.23.4", "none"),
        ("2.27.7", "text"),
        ("2.28.9", "json"),
        ("2.30.7", "monitor"),
    ];
    for (at, (release, has)) in releases.into_iter().enumerate() {
        let addresses = addresses(5 + at as u16).replace("{rank}", "0");
        let environment = [
            ("NCCL_EMULATOR_VERSION", release),
            ("NCCL_RAS_ADDR", &addresses),
            ("HAS", has),
        ];
        if is_child_of(name) {
            continue;
        }
        alone(name, &environment, || ());
    }
    if !is_child_of(name) {
        return;
    }
    let rank = Rank::join(unique_id(), 1, 0);
    let has = std::env::var("HAS").unwrap();
    if has == "none" {
        assert!(TcpStream::connect(own_address()).is_err());
    } else {
        let mut client = Client::connect(&own_address());
        assert_eq!(client.ask("client protocol 1"), "SERVER PROTOCOL 2");
        let has_json = has != "text";
        assert_eq!(client.ask("SET FORMAT json") == "OK", has_json);
        assert_eq!(client.ask("MONITOR") == "OK", has == "monitor");
        assert!(text(&own_address(), true).contains("RUNNING      OK\n"));
    }
    rank.destroy();
}

#[test]
fn a_variable_turns_the_service_off() {
    let name = "a_variable_turns_the_service_off";
    let address = addresses(9).replace("{rank}", "0");
    let environment = [("NCCL_RAS_ENABLE", "0"), ("NCCL_RAS_ADDR", &address)];
    alone(name, &environment, || {
        let rank = Rank::join(unique_id(), 1, 0);
        assert!(TcpStream::connect(own_address()).is_err());
        rank.destroy();
    });
}

#[test]
fn garbage_and_clients_that_do_nothing_do_no_harm() {
    let name = "garbage_and_clients_that_do_nothing_do_no_harm";
    let address = addresses(10).replace("{rank}", "0");
    alone(name, &[("NCCL_RAS_ADDR", &address)], || {
        let rank = Rank::join(unique_id(), 1, 0);
        let address = own_address();
        let mut random = fastrand::Rng::with_seed(3);
        for _ in 0..200 {
            let mut stream = TcpStream::connect(&address).unwrap();
            let bytes: Vec<u8> = (0..random.usize(..3000)).map(|_| random.u8(..)).collect();
            let _ = stream.write_all(&bytes);
        }
        // The service closes a connection whose line is too long.
        let mut client = Client::connect(&address);
        client.0.get_ref().write_all(&[b'x'; 4000]).unwrap();
        assert!(matches!(client.0.read(&mut [0]), Ok(0) | Err(_)));
        // An incomplete command, half-closed connections, and answers that are not read.
        let mut idle = Vec::new();
        for line in [
            "STAT",
            "CLIENT PROTOCOL 2\n",
            "VERBOSE STATUS\n",
            "MONITOR all\n",
        ] {
            let mut stream = TcpStream::connect(&address).unwrap();
            stream.write_all(line.as_bytes()).unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            idle.push(stream);
        }
        let said = text(&address, false);
        assert!(said.contains("RUNNING      OK"), "{said}");
        assert_eq!(communicator(&json(&address))["size"], 1);
        // Commands sent before the end of the input are answered.
        let mut said = String::new();
        idle[2].read_to_string(&mut said).unwrap();
        assert!(said.contains("RUNNING      OK"), "{said}");
        rank.destroy();
    });
}
