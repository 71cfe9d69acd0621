//! Parses the lines of the kernel's log.
//!
//! [`Lines`] takes the records of `/dev/kmsg` one by one, and reads neither a file nor a clock. Lines are written by
//! drivers and contain names of programs, so each text is sanitised and cut.

use std::time::Duration;

use super::kernel_event::{KernelEvent, KernelEventKind, LONG, MOST, OomKill, SHORT, Xid, shown};

/// Collects the events of a log, line by line.
pub(super) struct Lines {
    /// Lines before this time, since the host's start, are ignored.
    since: Duration,
    /// The time at which ages are zero.
    now: Duration,
    pub(super) events: Vec<KernelEvent>,
    /// Number of events left out.
    pub(super) omitted: usize,
}

impl Lines {
    pub(super) fn new(since: Duration, now: Duration) -> Self {
        Self {
            since,
            now,
            events: Vec::new(),
            omitted: 0,
        }
    }

    /// Parses a line: a record of `/dev/kmsg`, or a line printed by `dmesg`. All other lines are ignored.
    pub(super) fn add(&mut self, line: &[u8]) {
        // Nearly all lines are about something else.
        let is_of_interest = contains(line, b"Xid (") || contains(line, b"ill");
        if !is_of_interest {
            return;
        }
        let line = String::from_utf8_lossy(line);
        let Some((time, text)) = split(&line) else {
            return;
        };
        if time < self.since {
            return;
        }
        let Some(kind) = event(text) else { return };
        let age = self.now.saturating_sub(time).as_millis();
        let age = Duration::from_millis(u64::try_from(age).unwrap_or(u64::MAX));
        self.push(KernelEvent {
            age,
            times: 1,
            kind,
        });
    }

    fn push(&mut self, event: KernelEvent) {
        for place in (0..self.events.len()).rev() {
            let known = &mut self.events[place];
            match (&mut known.kind, &event.kind) {
                (KernelEventKind::Xid(known_xid), KernelEventKind::Xid(xid))
                    if known_xid.is_same(xid) =>
                {
                    known.times = known.times.saturating_add(1);
                    // The last occurrence is more informative than the first, and counts in the order of events.
                    known.age = event.age;
                    self.events[place..].rotate_left(1);
                    return;
                }
                // The kernel writes two lines about one victim.
                (KernelEventKind::OomKill(known_kill), KernelEventKind::OomKill(kill))
                    if known_kill.pid == kill.pid
                        && known.age.saturating_sub(event.age) < Duration::from_secs(2) =>
                {
                    known_kill.complete(kill);
                    return;
                }
                _ => {}
            }
        }
        if self.events.len() >= MOST {
            self.omitted += 1;
            // The newest events stay; messages of the driver take precedence over victims of the out-of-memory killer.
            let is_kill = |event: &KernelEvent| matches!(event.kind, KernelEventKind::OomKill(_));
            let oldest_kill = self.events.iter().position(is_kill);
            match (oldest_kill, is_kill(&event)) {
                (None, true) => return,
                (kill, _) => drop(self.events.remove(kill.unwrap_or(0))),
            }
        }
        self.events.push(event);
    }
}

impl Xid {
    fn is_same(&self, other: &Self) -> bool {
        let of = |xid: &Self| (xid.number, xid.of_switch, xid.pid);
        of(self) == of(other) && self.device == other.device
    }
}

impl OomKill {
    /// Adds the values that another line has about the same victim.
    fn complete(&mut self, other: &Self) {
        let texts = [
            (&mut self.cgroup, &other.cgroup),
            (&mut self.limited, &other.limited),
        ];
        for (own, other) in texts {
            if own.is_none() {
                own.clone_from(other);
            }
        }
        self.anonymous_kib = self.anonymous_kib.or(other.anonymous_kib);
        self.whole_host |= other.whole_host;
    }
}

fn contains(line: &[u8], word: &[u8]) -> bool {
    line.windows(word.len()).any(|window| window == word)
}

/// Splits a line into the time since the host's start, and its text. `None` for lines that the kernel itself has not
/// written: programs may write into its log as well.
fn split(line: &str) -> Option<(Duration, &str)> {
    if let Some(kmsg) = line.split_once(';').and_then(|(head, text)| {
        let mut fields = head.split(',');
        let priority: u32 = fields.next()?.parse().ok()?;
        let _sequence: u64 = fields.next()?.parse().ok()?;
        let micros: u64 = fields.next()?.parse().ok()?;
        Some((priority, Duration::from_micros(micros), text))
    }) {
        let (priority, time, text) = kmsg;
        // The facility is above three bits of urgency; that of the kernel is 0.
        return (priority >> 3 == 0)
            .then(|| (time, text.lines().next().unwrap_or_default().trim()));
    }
    // `<4>[   12.345678] text`, or with the thread that wrote it, `[   12.345678] [  T123] text`.
    let line = match line.strip_prefix('<') {
        Some(rest) => rest.split_once('>')?.1,
        None => line,
    };
    let (time, mut text) = line.strip_prefix('[')?.split_once(']')?;
    let (seconds, micros) = time.trim().split_once('.')?;
    let (seconds, micros): (u64, u32) = (seconds.parse().ok()?, micros.parse().ok()?);
    if micros >= 1_000_000 {
        return None;
    }
    text = text.trim_start();
    if let Some((writer, rest)) = text.strip_prefix('[').and_then(|text| text.split_once(']'))
        && writer.trim_start().starts_with(['T', 'C'])
    {
        text = rest;
    }
    Some((Duration::new(seconds, micros * 1000), text.trim()))
}

fn event(text: &str) -> Option<KernelEventKind> {
    if let Some(rest) = text.strip_prefix("NVRM: Xid (") {
        return xid_of(rest, false).map(KernelEventKind::Xid);
    }
    if text.starts_with("nvidia-nvswitch")
        && let Some((_, rest)) = text.split_once(": SXid (")
    {
        return xid_of(rest, true).map(KernelEventKind::Xid);
    }
    let kill = victim(text).or_else(|| killed(text))?;
    Some(KernelEventKind::OomKill(kill))
}

/// Parses what follows `Xid (`: `PCI:0000:3b:00): 79, pid=123, name=python, text`.
fn xid_of(rest: &str, of_switch: bool) -> Option<Xid> {
    let (device, rest) = rest.split_once("): ")?;
    let (number, text) = rest.split_once(',').unwrap_or((rest, ""));
    let number = number.trim().parse().ok()?;
    let mut text = text.trim();
    let mut pid = None;
    for name in ["pid=", "name="] {
        if let Some(rest) = text.strip_prefix(name) {
            let (value, rest) = rest.split_once(',').unwrap_or((rest, ""));
            if name == "pid=" {
                // `'<unknown>'` where it is of no process.
                pid = value.trim_matches('\'').parse().ok();
            }
            text = rest.trim();
        }
    }
    Some(Xid {
        number,
        of_switch,
        device: device_address(device)?,
        pid,
        text: shown(text, LONG),
    })
}

/// Returns the address as the system writes it: `0000:3b:00.0`.
fn device_address(text: &str) -> Option<String> {
    let text = text.strip_prefix("PCI:").unwrap_or(text).trim();
    let is_address = |c: char| c.is_ascii_hexdigit() || matches!(c, ':' | '.');
    if text.is_empty() || text.len() > SHORT || !text.chars().all(is_address) {
        return None;
    }
    let text = text.to_ascii_lowercase();
    // Some messages have a domain of eight digits.
    let text = match text.strip_prefix("0000") {
        Some(rest) if rest.find(':') == Some(4) => rest.to_owned(),
        _ => text,
    };
    Some(match text.contains('.') {
        true => text,
        false => format!("{text}.0"),
    })
}

/// Parses `oom-kill:constraint=…,oom_memcg=/a,task_memcg=/a/b,task=python,pid=123,uid=0`.
fn victim(text: &str) -> Option<OomKill> {
    let fields = text.strip_prefix("oom-kill:")?;
    // The names of groups and processes may contain commas: each field is found by the name of the next one.
    let (fields, pid) = fields.rsplit_once(",pid=")?;
    let pid = pid.split(',').next()?.parse().ok()?;
    let (fields, name) = fields.rsplit_once(",task=")?;
    let (fields, cgroup) = fields.rsplit_once(",task_memcg=")?;
    let limited = fields.rsplit_once(",oom_memcg=").map(|(_, group)| group);
    Some(OomKill {
        pid,
        name: shown(name, SHORT),
        cgroup: Some(shown(cgroup, LONG)),
        limited: limited.map(|group| shown(group, LONG)),
        whole_host: limited.is_none(),
        anonymous_kib: None,
    })
}

/// Parses `Memory cgroup out of memory: Killed process 123 (python) total-vm:…kB, anon-rss:…kB, …`.
fn killed(text: &str) -> Option<OomKill> {
    let (reason, rest) = text
        .split_once("Killed process ")
        .or_else(|| text.split_once("Kill process "))?;
    let reason = reason.trim_end_matches([':', ' ']);
    // The second line of older kernels has no reason in front; they write one before it.
    let whole_host = match reason {
        "Out of memory" | "Out of memory (oom_kill_allocating_task)" => true,
        "Memory cgroup out of memory" | "" => false,
        _ => return None,
    };
    let (pid, rest) = rest.split_once([' ', ','])?;
    let pid = pid.parse().ok()?;
    let rest = &rest[rest.find('(')? + 1..];
    let end = rest
        .rfind(") total-vm:")
        .or_else(|| rest.rfind(") score "))
        .or_else(|| rest.rfind("), "))
        .or_else(|| rest.rfind(')'))?;
    let anonymous_kib = rest[end..].split_once("anon-rss:").and_then(|(_, value)| {
        let digits = value.find(|c: char| !c.is_ascii_digit())?;
        value[..digits].parse().ok()
    });
    Some(OomKill {
        pid,
        name: shown(&rest[..end], SHORT),
        whole_host,
        anonymous_kib,
        ..OomKill::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(lines: &[&str]) -> Vec<KernelEvent> {
        let mut log = Lines::new(Duration::from_secs(100), Duration::from_secs(1000));
        lines.iter().for_each(|line| log.add(line.as_bytes()));
        log.events
    }

    fn one(line: &str) -> String {
        let events = read(&[line]);
        assert_eq!(events.len(), 1, "{line}");
        events[0].to_string()
    }

    #[test]
    fn an_xid_is_read_with_number_device_and_process() {
        for (line, said) in [
            (
                "4,1234,996000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
                "Xid 79 (GPU has fallen off the bus) for 0000:3b:00.0",
            ),
            (
                "4,1234,996000000,-;NVRM: Xid (PCI:0000:1A:00): 95, pid=4711, name=python, Uncontained: LTC TAG",
                "Xid 95 (uncontained memory error: the GPU has to be reset) for 0000:1a:00.0, process 4711",
            ),
            (
                "4,1234,996000000,-;NVRM: Xid (00000000:0A:00.0): 777, something new\n SUBSYSTEM=pci",
                "Xid 777 for 0000:0a:00.0: something new",
            ),
            (
                "[  996.000000] NVRM: Xid (0000:03:00): 48, DBE",
                "Xid 48 (uncorrectable ECC error in GPU memory) for 0000:03:00.0",
            ),
            (
                "<4>[  996.000000] [ T1234] nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 32 egress",
                "SXid 12028 for 0000:c1:00.0: Non-fatal, Link 32 egress",
            ),
        ] {
            assert_eq!(one(line), said);
            assert_eq!(read(&[line])[0].age, Duration::from_secs(4));
        }
    }

    #[test]
    fn the_lines_about_a_victim_of_the_oom_killer_are_one_event() {
        let events = read(&[
            "6,1,900000000,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,oom_memcg=/job/a,b,task_memcg=/job/a,b/rank-3,task=py,pid=1,thon,pid=123,uid=0",
            "3,2,900000001,-;Memory cgroup out of memory: Killed process 123 (py,pid=1,thon) total-vm:4000kB, anon-rss:2097152kB, file-rss:0kB, shmem-rss:0kB, UID:0 pgtables:1kB oom_score_adj:0",
        ]);
        let [event] = &events[..] else {
            panic!("{events:?}")
        };
        assert_eq!(
            event.to_string(),
            "the OOM killer ended pid 123 (py,pid=1,thon), which had 2048 MiB of memory: the limit of control group \
             /job/a,b was reached"
        );
        assert_eq!(
            one(
                "3,2,900000001,-;Out of memory: Killed process 7 (a) b) total-vm:1kB, anon-rss:1024kB, x"
            ),
            "the OOM killer ended pid 7 (a) b), which had 1 MiB of memory: the host had no memory left"
        );
        let whole = read(&[
            "6,1,900000000,-;oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,global_oom,task_memcg=/x,task=y,pid=9,uid=0",
        ]);
        assert!(matches!(&whole[0].kind, KernelEventKind::OomKill(kill) if kill.whole_host));
    }

    #[test]
    fn what_is_old_or_written_by_a_program_or_about_something_else_is_no_event() {
        for line in [
            // Before the process was started.
            "4,1234,99000000,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
            // A line that a program wrote into the log.
            "12,1234,996000000,-;NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
            "4,1234,996000000,-;systemd: read that NVRM: Xid (PCI:0000:3b:00): 79, x",
            "4,1234,996000000,-;NVRM: Xid (PCI:0000:3b:00): many",
            "4,1234,996000000,-;NVRM: Xid (PCI:\x1b[2J): 79, x",
            "4,1234,996000000,-;sysrq: Kill process 3 (x)",
            "4,1234,996000000,-;Killed process x (y)",
            " SUBSYSTEM=pci",
            "",
        ] {
            assert_eq!(read(&[line]), [], "{line}");
        }
    }

    #[test]
    fn a_storm_of_one_xid_is_one_event_and_the_number_of_events_is_bounded() {
        let line = |number: u32, at: u64| {
            format!(
                "4,1,{},-;NVRM: Xid (PCI:0000:3b:00): {number}, x",
                at * 1_000_000
            )
        };
        let mut log = Lines::new(Duration::ZERO, Duration::from_secs(1000));
        for at in 0..500 {
            log.add(line(74, 400 + at).as_bytes());
        }
        assert_eq!((log.events.len(), log.events[0].times), (1, 500));
        assert_eq!(log.events[0].age, Duration::from_secs(101));
        assert!(log.events[0].to_string().ends_with("(500 times)"));
        for number in 0..200 {
            log.add(line(1000 + number, 950).as_bytes());
        }
        assert_eq!((log.events.len(), log.omitted), (MOST, 137));
        // The newest events stay, and a victim of the out-of-memory killer replaces no message.
        let last = log.events.last().map(|event| event.to_string());
        assert!(last.is_some_and(|last| last.contains("1199")));
        log.add(
            b"4,1,960000000,-;Out of memory: Killed process 123 (py) total-vm:4kB, anon-rss:2kB, x",
        );
        assert_eq!((log.events.len(), log.omitted), (MOST, 138));
        let is_kill = |event: &KernelEvent| matches!(event.kind, KernelEventKind::OomKill(_));
        assert!(!log.events.iter().any(is_kill));
        // One that is reported again is a new one.
        log.add(line(1136, 970).as_bytes());
        for number in 0..MOST as u32 - 1 {
            log.add(line(2000 + number, 980).as_bytes());
        }
        let first = &log.events[0];
        assert!(first.to_string().contains("1136"), "{first}");
        assert_eq!((log.events.len(), first.times), (MOST, 2));
        assert!(
            log.events
                .is_sorted_by_key(|event| std::cmp::Reverse(event.age))
        );
    }

    #[test]
    fn no_bytes_make_the_parser_panic_and_what_it_shows_is_one_bounded_line() {
        const SEEDS: [&str; 5] = [
            "4,1234,996000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=12, name=py, GPU has fallen off the bus.",
            "4,1,996000000,-;nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 12028, Non-fatal, Link 32",
            "6,1,996000000,-;oom-kill:constraint=CONSTRAINT_MEMCG,oom_memcg=/a,task_memcg=/b,task=py,pid=123,uid=0",
            "3,2,996000000,-;Out of memory: Killed process 123 (py) total-vm:4kB, anon-rss:2kB, x",
            "<4>[  996.000000] [ T1234] NVRM: Xid (0000:03:00): 48, DBE",
        ];
        const SIGNS: &[u8] = b"0123456789,;:()[]<>=./ \x1b\n\xff\xe2";
        let mut random = fastrand::Rng::with_seed(5);
        let mut understood = 0;
        for round in 0..20_000 {
            let mut line = SEEDS[round % SEEDS.len()].as_bytes().to_vec();
            for _ in 0..random.usize(0..4) {
                let at = random.usize(0..line.len());
                match random.u8(0..5) {
                    0 => line[at] = random.u8(..),
                    1 => line.insert(at, SIGNS[random.usize(0..SIGNS.len())]),
                    2 if line.len() > 1 => drop(line.remove(at)),
                    3 => line.truncate(at.max(1)),
                    _ => {
                        let part = line[at..].to_vec();
                        line.extend_from_slice(&part);
                    }
                }
            }
            let mut log = Lines::new(Duration::ZERO, Duration::from_secs(1000));
            log.add(&line);
            for event in &log.events {
                understood += 1;
                let said = event.to_string();
                assert!(said.len() < 1200, "{said}");
                assert!(!said.contains(char::is_control), "{said:?}");
                let json = serde_json::to_string(event).unwrap();
                assert_eq!(&serde_json::from_str::<KernelEvent>(&json).unwrap(), event);
            }
        }
        assert!(understood > 5000, "{understood}");
    }
}
