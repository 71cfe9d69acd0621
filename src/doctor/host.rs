//! The evidence of this host: failed devices and killed processes in the kernel's log, memory shortage, and the state of
//! devices in NVML.

use std::time::Duration;

use nccl::host_evidence::{
    DeviceState, DeviceTrouble, Devices, HostEvidence, KernelEvent, KernelEventKind, LogAccess,
    Memory, NvmlAccess, Xid,
};
use nccl::preflight::{Finding, Severity};

/// A device that failed within this time may fail the next job as well.
const RECENT: Duration = Duration::from_secs(3600);

/// Processes killed earlier than this are hardly relevant.
const OLD: Duration = Duration::from_secs(24 * 3600);

/// The check of the devices' state in NVML; preflight's check `device` is about the assignment of devices to ranks.
const DEVICE: &str = "device-state";

/// The most findings of one check.
const MOST: usize = 16;

/// The findings about this host.
pub(super) fn findings() -> Vec<Finding> {
    of(&HostEvidence::of_host())
}

fn of(evidence: &HostEvidence) -> Vec<Finding> {
    let log = &evidence.kernel_log;
    let mut entries = vec![match log.access {
        LogAccess::Read if log.events.is_empty() => Finding::ok(
            "kernel-log",
            "no device has failed, and no process was ended for want of memory, since the host was started",
        ),
        LogAccess::Read => Finding::ok("kernel-log", "it was read, and has what follows"),
        _ => Finding::ok("kernel-log", format!("nothing is known: {}", log.access)).fix(
            "run nccl-doctor as root on the host to see Xid messages, or set kernel.dmesg_restrict to 0",
        ),
    }];
    entries.extend(bounded(log.events.iter().filter_map(xid)));
    entries.extend(bounded(log.events.iter().filter_map(oom_kill)));
    entries.push(memory(&evidence.memory));
    entries.extend(devices(&evidence.devices));
    entries
}

/// Returns findings about the devices that NVML reports; none if NVML was not queried.
fn devices(devices: &Devices) -> Vec<Finding> {
    match &devices.access {
        NvmlAccess::NotAsked => return Vec::new(),
        NvmlAccess::NoAnswer => {
            let what = format!(
                "{}: a device or the driver of the host may hang",
                devices.access
            );
            let fix = "look whether nvidia-smi comes back, and at the kernel's log for Xid messages; reset the device \
                       (nvidia-smi -r), or the host";
            return vec![Finding::error(DEVICE, what).fix(fix)];
        }
        NvmlAccess::Answered => {}
        access => return vec![Finding::ok(DEVICE, format!("nothing is known: {access}"))],
    }
    let in_trouble: Vec<Finding> = devices.list.iter().filter_map(device).collect();
    match (in_trouble.is_empty(), devices.list.len()) {
        (false, _) => in_trouble,
        (true, 0) => vec![Finding::ok(DEVICE, "NVML shows no device")],
        (true, count) => {
            let of = if count == 1 { "device" } else { "devices" };
            let what = format!("NVML shows nothing wrong with {count} {of}");
            vec![Finding::ok(DEVICE, what)]
        }
    }
}

fn device(device: &DeviceState) -> Option<Finding> {
    let is_severe = |trouble: &DeviceTrouble| {
        matches!(
            trouble,
            DeviceTrouble::Lost | DeviceTrouble::Unreadable(_) | DeviceTrouble::RowRemapFailed
        )
    };
    let troubles = &device.troubles;
    let what = device.to_string();
    if troubles.iter().any(is_severe) {
        let fix = "take the device or the host out of use until it was reset (nvidia-smi -r) or repaired: nvidia-smi -q shows its \
                   state";
        return Some(Finding::error(DEVICE, what).fix(fix));
    }
    (!troubles.is_empty()).then(|| {
        let fix = "nvidia-smi -q shows its state; a reset (nvidia-smi -r) repairs memory that waits for it";
        Finding::warning(DEVICE, what).fix(fix)
    })
}

/// The newest findings.
fn bounded(found: impl DoubleEndedIterator<Item = Finding>) -> Vec<Finding> {
    let mut newest: Vec<_> = found.rev().take(MOST).collect();
    newest.reverse();
    newest
}

fn xid(event: &KernelEvent) -> Option<Finding> {
    let KernelEventKind::Xid(xid) = &event.kind else {
        return None;
    };
    let what = format!("{event}, {} ago", age(event.age));
    Some(match severity(xid, event.age) {
        Severity::Ok => Finding::ok("xid", what),
        Severity::Warning => Finding::warning("xid", what).fix(
            "see NVIDIA's Xid catalogue for that number, and nvidia-smi -q for the state of the device now",
        ),
        _ => Finding::error("xid", what).fix(
            "take the device or the host out of use until it was reset (nvidia-smi -r) or repaired: nvidia-smi -q shows its \
             state, NVIDIA's Xid catalogue what to do",
        ),
    })
}

fn severity(xid: &Xid, age: Duration) -> Severity {
    // Memory that was remapped or retired, and errors that were corrected: the device works.
    let is_corrected = matches!(xid.number, 63 | 92 | 156);
    let is_fatal = match xid.of_switch {
        true => !xid.text.contains("Non-fatal"),
        false => xid.explanation().is_some() && !is_corrected,
    };
    match xid.is_of_program() {
        true => Severity::Ok,
        false if is_fatal && age < RECENT => Severity::Error,
        false => Severity::Warning,
    }
}

fn oom_kill(event: &KernelEvent) -> Option<Finding> {
    if !matches!(event.kind, KernelEventKind::OomKill(_)) {
        return None;
    }
    let what = format!("{event}, {} ago", age(event.age));
    Some(match event.age < OLD {
        true => Finding::warning("oom-killer", what)
            .fix("give the control group or the host more memory, or start fewer processes there"),
        false => Finding::ok("oom-killer", what),
    })
}

fn memory(memory: &Memory) -> Finding {
    let what = memory.to_string();
    match memory.is_short() {
        true => Finding::warning("memory-pressure", what)
            .fix("ranks that wait for memory are late: give them more, or end what else uses it"),
        false => Finding::ok("memory-pressure", what),
    }
}

/// Formats an age coarsely, so that ranks that check one after the other report the same text.
fn age(age: Duration) -> String {
    match age.as_secs() {
        seconds @ 0..120 => format!("{seconds} s"),
        seconds @ 120..7200 => format!("{} min", seconds / 60),
        seconds @ 7200..172_800 => format!("{} h", seconds / 3600),
        seconds => format!("{} days", seconds / 86_400),
    }
}

/// Returns the host's evidence about a call that does not return in this process, and advice on where to look for more.
pub(super) fn of_stuck_call() -> (String, String) {
    let evidence = HostEvidence::gather();
    let log = &evidence.kernel_log;
    let events = log.events.iter().map(ToString::to_string);
    let threads = evidence.threads.iter().map(ToString::to_string);
    let devices = evidence.devices.list.iter();
    let devices = devices.filter(|device| !device.troubles.is_empty());
    let seen: Vec<String> = events
        .chain(threads)
        .chain(devices.map(ToString::to_string))
        .collect();
    let seen = match seen.is_empty() {
        true => String::new(),
        false => format!("; {}", seen.join("; ")),
    };
    let fix = match &log.access {
        LogAccess::Read if log.events.is_empty() => String::from(
            "look at that device: nvidia-smi; the kernel's log has nothing about it since this program was started",
        ),
        LogAccess::Read => String::from("look at that device: nvidia-smi"),
        closed => {
            format!("look at that device: nvidia-smi, and the kernel's log (Xid): {closed}")
        }
    };
    (seen, fix)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn found(evidence: serde_json::Value) -> Vec<(String, Severity)> {
        let evidence: HostEvidence = serde_json::from_value(evidence).unwrap();
        let entries = of(&evidence).into_iter();
        entries.map(|entry| (entry.check, entry.severity)).collect()
    }

    fn xid(number: u32, age_s: u64) -> serde_json::Value {
        json!({"age_ms": age_s * 1000, "times": 1, "kind": "xid", "number": number, "of_switch": false,
            "device": "0000:3b:00.0", "text": ""})
    }

    #[test]
    fn a_device_that_failed_just_now_is_an_error_and_a_fault_of_a_program_is_none() {
        let kill = |age_s: u64| json!({"age_ms": age_s * 1000, "times": 1, "kind": "oom_kill", "pid": 7, "name": "py", "whole_host": true});
        let events = [
            xid(79, 5),
            xid(79, 5000),
            xid(63, 5),
            xid(31, 5),
            xid(777, 5),
            kill(5),
            kill(100_000),
        ];
        let evidence = json!({
            "kernel_log": {"access": "read", "events": events}, "memory": {"cgroup": "/a", "pressure": 50.0},
        });
        let severities: Vec<_> = found(evidence)
            .into_iter()
            .map(|(check, severity)| format!("{check} {severity}"))
            .collect();
        assert_eq!(
            severities,
            [
                "kernel-log ok",
                "xid error",
                "xid warning",
                "xid warning",
                "xid ok",
                "xid warning",
                "oom-killer warning",
                "oom-killer ok",
                "memory-pressure warning",
            ]
        );
    }

    #[test]
    fn a_device_that_is_lost_is_an_error_and_a_healthy_host_is_told_in_one_line() {
        let device = |bus_id: &str, troubles: serde_json::Value| json!({"bus_id": bus_id, "troubles": troubles});
        let said = |access: serde_json::Value, list: serde_json::Value| -> Vec<String> {
            let evidence = json!({"devices": {"access": access, "list": list}});
            let evidence: HostEvidence = serde_json::from_value(evidence).unwrap();
            let found = of(&evidence).into_iter();
            let found = found.filter(|entry| entry.check == DEVICE);
            found
                .map(|entry| format!("{} {}", entry.severity, entry.what))
                .collect()
        };
        let healthy = json!([
            device("0000:01:00.0", json!([])),
            device("0000:02:00.0", json!([]))
        ]);
        assert_eq!(
            said(json!("answered"), healthy),
            ["ok NVML shows nothing wrong with 2 devices"]
        );
        let ecc = json!([{"uncorrected_ecc": {"errors": 1, "since_driver_start": true}}]);
        let bad = json!([
            device("0000:01:00.0", ecc),
            device("number 1", json!(["lost"]))
        ]);
        assert_eq!(
            said(json!("answered"), bad),
            [
                "warning device 0000:01:00.0: 1 uncorrected ECC error since the driver was started",
                "error device number 1: the driver does not reach it any more (GPU is lost)",
            ]
        );
        assert_eq!(said(json!("no_answer"), json!([])).len(), 1);
        assert_eq!(
            said(json!({"absent": "no library"}), json!([])),
            ["ok nothing is known: there is no NVML here: no library"]
        );
        assert!(said(json!("not_asked"), json!([])).is_empty());
    }

    #[test]
    fn a_log_that_may_not_be_read_is_said_and_is_no_fault_of_the_host() {
        let evidence: HostEvidence = serde_json::from_value(
            json!({"kernel_log": {"access": "not_permitted", "events": []}}),
        )
        .unwrap();
        let entries = of(&evidence);
        assert_eq!(entries[0].severity, Severity::Ok);
        assert!(
            entries[0].what.contains("may not read /dev/kmsg"),
            "{}",
            entries[0]
        );
        assert_eq!(entries.len(), 2);
    }

    #[test]
    fn a_storm_of_different_messages_is_bounded() {
        let events: Vec<_> = (200..260).map(|number| xid(number, 5)).collect();
        let evidence = json!({"kernel_log": {"access": "read", "events": events}});
        assert_eq!(found(evidence).len(), MOST + 2);
    }
}
