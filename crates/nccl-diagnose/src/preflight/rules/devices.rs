//! Devices: whether ranks share one, their state according to NVML, and whether a thread's context is that of its
//! stream's device.

use std::collections::BTreeMap;

use super::view::FactsView;
use crate::host_evidence::NvmlAccess;
use crate::preflight::device::Device;
use crate::preflight::facts::ProcessFacts;
use nccl_base::report::{Finding, Severity};

/// The name of the check of the state that NVML reports.
const STATE: &str = "device-state";

pub(super) fn check(view: &FactsView<'_>, found: &mut Vec<Finding>) {
    let before = found.len();
    shared(view, found);
    defects(view, found);
    bound(view, found);
    visible(view, found);
    let ranks: Vec<usize> = view
        .ranks()
        .filter(|&rank| device(view, rank).is_some())
        .collect();
    if found.len() == before && !ranks.is_empty() {
        let text = match &ranks[..] {
            [rank] => format!(
                "the device is {}",
                device(view, *rank).map_or_else(String::new, called)
            ),
            _ => String::from("every rank has a device of its own, or may share it"),
        };
        found.push(view.about(&ranks, Finding::new(Severity::Ok, "device", text)));
    }
}

fn device<'f>(view: &FactsView<'f>, rank: usize) -> Option<&'f Device> {
    view.facts(rank).device.as_ref()
}

fn called(device: &Device) -> String {
    format!(
        "device {} ({}, {})",
        device.ordinal, device.name, device.uuid
    )
}

/// Ranks of one NCCL host that have the same device.
fn shared(view: &FactsView<'_>, found: &mut Vec<Finding>) {
    let mut by_device: BTreeMap<(String, &str), Vec<usize>> = BTreeMap::new();
    for rank in view.ranks() {
        let (Some(device), Some(process)) = (device(view, rank), view.process(rank)) else {
            continue;
        };
        // Parts of a device can have the UUID of the whole.
        if !device.uuid.is_empty() && !device.name.contains(" MIG ") {
            let key = (process.nccl_host(), &device.uuid[..]);
            by_device.entry(key).or_default().push(rank);
        }
    }
    for ranks in by_device.into_values().filter(|ranks| ranks.len() > 1) {
        let allowed = |&rank: &usize| {
            let process = view.process(rank);
            let is_on = process.is_some_and(|process| process.is_on("NCCL_MULTI_RANK_GPU_ENABLE"));
            let loaded = view.facts(rank).library.as_ref();
            is_on && loaded.is_none_or(|loaded| knows_shared_devices(&loaded.version))
        };
        if ranks.iter().all(allowed) {
            continue;
        }
        let Some(device) = device(view, ranks[0]) else {
            continue;
        };
        let each: Vec<String> = ranks
            .iter()
            .take(8)
            .map(|&rank| {
                let process = view.process(rank);
                let pid = process.map_or(0, |process| process.pid);
                let visible = process.and_then(|process| process.visible_devices.as_deref());
                let visible = visible.map_or_else(
                    || String::from("without CUDA_VISIBLE_DEVICES"),
                    |visible| format!("CUDA_VISIBLE_DEVICES={visible}"),
                );
                let ordinal = view
                    .facts(rank)
                    .device
                    .as_ref()
                    .map_or(0, |device| device.ordinal);
                format!("rank {rank} (pid {pid}) as device {ordinal}, {visible}")
            })
            .collect();
        let what = format!(
            "{} use the same device, {} ({}): {}",
            view.who(&ranks),
            device.name,
            device.uuid,
            each.join("; ")
        );
        let fix = "take CudaContext::new(world.local_rank()), or give each rank a CUDA_VISIBLE_DEVICES of its own; \
                   NCCL from 2.30.3 on lets ranks share a device with NCCL_MULTI_RANK_GPU_ENABLE=1";
        found.push(view.about(&ranks, Finding::error("device", what).fix(fix)));
    }
}

/// Whether the release reads the variable; older ones do not.
fn knows_shared_devices(version: &str) -> bool {
    let numbers: Vec<u32> = version
        .split('.')
        .filter_map(|part| part.parse().ok())
        .collect();
    numbers >= vec![2, 30, 3]
}

/// Devices that have to be reset or repaired before they are used, or that work with reduced capability.
fn defects(view: &FactsView<'_>, found: &mut Vec<Finding>) {
    let nvml = |rank| device(view, rank).map(|device| &device.nvml);
    let state = |rank| nvml(rank)?.list.first();
    let silent: Vec<usize> = view
        .ranks()
        .filter(|&rank| nvml(rank).is_some_and(|nvml| nvml.access == NvmlAccess::NoAnswer))
        .collect();
    if !silent.is_empty() {
        let what = format!(
            "{}: {}: a device or the driver of the host may hang",
            view.who(&silent),
            NvmlAccess::NoAnswer
        );
        let fix =
            "look whether nvidia-smi comes back there, and at the kernel's log for Xid messages";
        found.push(view.about(&silent, Finding::warning(STATE, what).fix(fix)));
    }
    // Hosts on which links are active: there a device without one has lost its own.
    let has_links = |&rank: &usize| state(rank).is_some_and(|state| state.active_nvlinks > 0);
    let host = |rank: usize| view.process(rank).map(ProcessFacts::nccl_host);
    let with_links: Vec<String> = view.ranks().filter(has_links).filter_map(host).collect();
    for rank in view.ranks() {
        let Some(state) = state(rank) else {
            continue;
        };
        let troubles = state.troubles.iter();
        let troubles = troubles.filter(|trouble| trouble.is_defect());
        let mut said: Vec<String> = troubles.map(ToString::to_string).collect();
        let is_cut_off = state.nvlinks > 0 && state.active_nvlinks == 0;
        if is_cut_off && host(rank).is_some_and(|host| with_links.contains(&host)) {
            said.push(String::from(
                "none of its NVLink links is active, and those of other devices of the host are",
            ));
        }
        if said.is_empty() {
            continue;
        }
        let what = format!(
            "{}: device {}: {}",
            view.who(&[rank]),
            state.bus_id,
            said.join(", ")
        );
        let fix = "take the device out of use until it was reset (nvidia-smi -r), or its slot and links were repaired: \
                   nvidia-smi -q shows its state";
        found.push(view.about(&[rank], Finding::warning(STATE, what).fix(fix)));
    }
}

/// Threads with a context of another device: this crate binds its calls to the stream's device; other code does not.
fn bound(view: &FactsView<'_>, found: &mut Vec<Finding>) {
    for rank in view.ranks() {
        let Some(device) = device(view, rank) else {
            continue;
        };
        let Some(other) = device.bound_to.filter(|&other| other != device.ordinal) else {
            continue;
        };
        let what = format!(
            "{}: the communicator's stream is on device {}, and its thread is bound to device {other}: what \
             other code allocates on this thread is on the wrong one",
            view.who(&[rank]),
            device.ordinal
        );
        let finding = Finding::warning("device-of-thread", what)
            .fix("call bind_to_thread of the stream's CudaContext on this thread");
        found.push(view.about(&[rank], finding));
    }
}

fn visible(view: &FactsView<'_>, found: &mut Vec<Finding>) {
    let late = view.groups(|rank| {
        let device = device(view, rank)?;
        let list = view.process(rank)?.visible_devices.clone()?;
        let listed = list
            .split(',')
            .filter(|entry| !entry.trim().is_empty())
            .count() as u64;
        (listed > 0 && device.count > listed).then_some((list, device.count))
    });
    for ((list, count), ranks) in late {
        let what = format!(
            "{}: CUDA_VISIBLE_DEVICES={list} has no effect, CUDA shows {count} devices: it was set after CUDA was \
             started",
            view.who(&ranks)
        );
        let finding =
            Finding::warning("visible-devices", what).fix("set it before the process starts");
        found.push(view.about(&ranks, finding));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host_evidence::{DeviceState, DeviceTrouble, Devices};
    use crate::preflight::facts::Facts;
    use crate::preflight::tests::ranks_on;
    use nccl_base::report::Report;
    use nccl_base::system::variables::Variable;

    fn with_devices(hosts: &[&str], devices: &[u64]) -> Vec<Facts> {
        let mut facts = ranks_on(hosts);
        for (facts, &ordinal) in facts.iter_mut().zip(devices) {
            facts.device = Some(Device {
                ordinal,
                uuid: format!("GPU-{ordinal}"),
                name: String::from("H200"),
                count: 8,
                ..Device::default()
            });
        }
        facts
    }

    fn checked(facts: &[Facts]) -> Report {
        let mut found = Vec::new();
        check(&FactsView::of(facts), &mut found);
        Report::new(found)
    }

    #[test]
    fn two_ranks_on_one_device_are_named_with_what_each_can_see() {
        let mut facts = with_devices(&["h1", "h1", "h1"], &[0, 1, 1]);
        facts[2].process.as_mut().unwrap().visible_devices = Some(String::from("0,1,2,3,4,5,6,7"));
        let report = checked(&facts);
        let error = report.of(Severity::Error).next().unwrap();
        assert_eq!(error.ranks, [1, 2]);
        for words in [
            "ranks 1,2 (h1) use the same device, H200 (GPU-1)",
            "rank 1 (pid 1001) as device 1, without CUDA_VISIBLE_DEVICES",
            "rank 2 (pid 1002) as device 1, CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7",
        ] {
            assert!(error.what.contains(words), "{words:?} in {error}");
        }
    }

    #[test]
    fn a_device_may_be_shared_where_nccl_allows_it_and_never_is_between_hosts() {
        let facts = with_devices(&["h1", "h2"], &[0, 0]);
        assert!(checked(&facts).worst() == Severity::Ok);
        let mut facts = with_devices(&["h1", "h1"], &[0, 0]);
        assert_eq!(checked(&facts).worst(), Severity::Error);
        for rank in [0, 1] {
            assert_eq!(checked(&facts).worst(), Severity::Error);
            facts[rank].process.as_mut().unwrap().variables = vec![Variable {
                name: String::from("NCCL_MULTI_RANK_GPU_ENABLE"),
                value: String::from("1"),
                file: String::new(),
            }];
        }
        assert!(checked(&facts).worst() == Severity::Ok);
        for (version, fine) in [("2.30.3", true), ("2.32.1", true), ("2.29.7", false)] {
            facts[1].library = Some(crate::preflight::Loaded {
                version: version.to_owned(),
                path: String::new(),
                build_id: None,
            });
            assert_eq!(checked(&facts).worst() == Severity::Ok, fine, "{version}");
        }
    }

    #[test]
    fn ranks_that_are_threads_share_their_process_and_not_their_device() {
        let mut facts = with_devices(&["h1", "h1", "h1"], &[0, 1, 0]);
        facts[1].process = None;
        facts[2].process = None;
        assert_eq!(
            checked(&facts).of(Severity::Error).next().unwrap().ranks,
            [0, 2]
        );
    }

    #[test]
    fn a_device_in_a_bad_state_is_warned_of_and_a_healthy_one_is_not() {
        let mut facts = with_devices(&["h1", "h1", "h1", "h2", "h2"], &[0, 1, 2, 0, 1]);
        for (rank, facts) in facts.iter_mut().enumerate() {
            let nvml = &mut facts.device.as_mut().unwrap().nvml;
            nvml.access = NvmlAccess::Answered;
            nvml.list = vec![DeviceState {
                bus_id: format!("0000:0{rank}:00.0"),
                nvlinks: 18,
                active_nvlinks: 18,
                // A past event is no defect.
                troubles: vec![DeviceTrouble::PcieReplays(3)],
            }];
        }
        assert_eq!(checked(&facts).worst(), Severity::Ok);
        let state = |facts: &mut Vec<Facts>, rank: usize, change: &dyn Fn(&mut DeviceState)| {
            change(&mut facts[rank].device.as_mut().unwrap().nvml.list[0]);
        };
        state(&mut facts, 0, &|state| {
            state.troubles = vec![
                DeviceTrouble::RowRemapFailed,
                DeviceTrouble::PcieWidth { lanes: 8, most: 16 },
            ];
        });
        state(&mut facts, 1, &|state| state.active_nvlinks = 0);
        // On this host nothing is connected.
        state(&mut facts, 3, &|state| state.active_nvlinks = 0);
        state(&mut facts, 4, &|state| state.active_nvlinks = 0);
        facts[2].device.as_mut().unwrap().nvml = Devices::default();
        facts[2].device.as_mut().unwrap().nvml.access = NvmlAccess::NoAnswer;
        state(&mut facts, 0, &|state| state.active_nvlinks = 4);
        let report = checked(&facts);
        let said: Vec<String> = report
            .of(Severity::Warning)
            .map(|finding| format!("{} {:?} {}", finding.check, finding.ranks, finding.what))
            .collect();
        assert_eq!(
            said,
            [
                "device-state [0] rank 0 (h1): device 0000:00:00.0: a faulty row of its memory could not be remapped, its \
                 PCIe link has 8 of 16 lanes",
                "device-state [1] rank 1 (h1): device 0000:01:00.0: none of its NVLink links is active, and those of other \
                 devices of the host are",
                "device-state [2] rank 2 (h1): NVML did not answer: a device or the driver of the host may hang",
            ]
        );
    }

    #[test]
    fn a_thread_on_another_device_and_a_late_list_of_devices_are_warned_of() {
        let mut facts = with_devices(&["h1", "h1"], &[0, 1]);
        facts[1].device.as_mut().unwrap().bound_to = Some(0);
        facts[0].process.as_mut().unwrap().visible_devices = Some(String::from("0,1"));
        let report = checked(&facts).to_string();
        assert!(
            report.contains("rank 1 (h1): the communicator's stream is on device 1"),
            "{report}"
        );
        assert!(report.contains("bound to device 0"), "{report}");
        assert!(
            report.contains("rank 0 (h1): CUDA_VISIBLE_DEVICES=0,1 has no effect"),
            "{report}"
        );
    }
}
