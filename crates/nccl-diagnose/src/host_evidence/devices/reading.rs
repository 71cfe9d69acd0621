//! NVML's data about one device at one time, and the trouble that it shows.

use super::state::{DeviceState, DeviceTrouble, NvlinkError, ThrottleReason};

/// The kinds of errors of a link that are counted.
pub(super) const KINDS: [NvlinkError; 4] = [
    NvlinkError::Replay,
    NvlinkError::Recovery,
    NvlinkError::CrcFlit,
    NvlinkError::CrcData,
];

/// NVML's data about one device; values that it does not report are `None` or empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Reading {
    pub(super) is_lost: bool,
    /// Why nothing could be read.
    pub(super) unreadable: Option<String>,
    /// Uncorrected errors of its memory since the driver was started.
    pub(super) uncorrected: Option<u64>,
    pub(super) remap_failed: bool,
    pub(super) remap_pending: bool,
    pub(super) retirement_pending: bool,
    pub(super) links: Vec<Link>,
    /// Current and maximum number of lanes; the same for the generation.
    pub(super) pcie_lanes: Option<(u32, u32)>,
    pub(super) pcie_generation: Option<(u32, u32)>,
    pub(super) pcie_replays: Option<u32>,
    pub(super) throttle: Vec<ThrottleReason>,
    /// Whether nothing runs on it, so that it may save power.
    pub(super) is_idle: bool,
    pub(super) celsius: Option<u32>,
    /// Processes other than this one and its descendants.
    pub(super) processes: Vec<(u32, String)>,
}

/// Where readings come from.
pub(super) trait Source {
    /// Reads the states of all devices, with their PCI addresses.
    fn all(&mut self) -> Vec<(String, Reading)>;

    /// Reads the state of a device.
    fn read(&mut self, bus_id: &str) -> Reading;
}

/// An NVLink link.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Link {
    pub(super) number: u32,
    pub(super) is_active: bool,
    /// Errors of each of [`KINDS`].
    pub(super) errors: [Option<u64>; 4],
}

impl Reading {
    /// Returns the state of device `bus_id`; `before` is an earlier reading, from which counters count.
    pub(super) fn state(&self, bus_id: &str, before: Option<&Self>) -> DeviceState {
        let active = self.links.iter().filter(|link| link.is_active).count();
        DeviceState {
            bus_id: bus_id.to_owned(),
            troubles: self.troubles(before),
            nvlinks: u32::try_from(self.links.len()).unwrap_or(u32::MAX),
            active_nvlinks: u32::try_from(active).unwrap_or(u32::MAX),
        }
    }

    fn troubles(&self, before: Option<&Self>) -> Vec<DeviceTrouble> {
        if self.is_lost {
            return vec![DeviceTrouble::Lost];
        }
        let mut found = Vec::new();
        found.extend(self.unreadable.clone().map(DeviceTrouble::Unreadable));
        self.memory(before, &mut found);
        self.nvlink(before, &mut found);
        self.pcie(before, &mut found);
        let throttled = |&reason: &ThrottleReason| DeviceTrouble::Throttled {
            reason,
            celsius: self.celsius,
        };
        found.extend(self.throttle.iter().map(throttled));
        let processes = self.processes.iter().cloned();
        found.extend(processes.map(|(pid, name)| DeviceTrouble::OtherProcess { pid, name }));
        found
    }

    fn memory(&self, before: Option<&Self>, found: &mut Vec<DeviceTrouble>) {
        let errors = match before {
            Some(before) => grown(before.uncorrected, self.uncorrected),
            None => self.uncorrected.filter(|errors| *errors > 0),
        };
        found.extend(errors.map(|errors| DeviceTrouble::UncorrectedEcc {
            errors,
            since_driver_start: before.is_none(),
        }));
        let states = [
            (self.remap_failed, DeviceTrouble::RowRemapFailed),
            (self.remap_pending, DeviceTrouble::RowRemapPending),
            (self.retirement_pending, DeviceTrouble::RetirementPending),
        ];
        found.extend(
            states
                .into_iter()
                .filter(|(is_so, _)| *is_so)
                .map(|(_, trouble)| trouble),
        );
    }

    fn nvlink(&self, before: Option<&Self>, found: &mut Vec<DeviceTrouble>) {
        let earlier = |link: &Link| {
            let links = &before?.links;
            links.iter().find(|before| before.number == link.number)
        };
        // A device may have fewer links connected than it has: one bridge of two, for instance, or none.
        let has_active = self.links.iter().any(|link| link.is_active);
        let is_inactive = |link: &&Link| {
            let was_active = earlier(link).is_some_and(|before| before.is_active);
            !link.is_active && (has_active || was_active)
        };
        let inactive = self.links.iter().filter(is_inactive);
        let inactive: Vec<u32> = inactive.map(|link| link.number).collect();
        if !inactive.is_empty() {
            found.push(DeviceTrouble::InactiveNvlinks(inactive));
        }
        for link in &self.links {
            let Some(before) = earlier(link) else {
                continue;
            };
            for (place, kind) in KINDS.into_iter().enumerate() {
                if let Some(errors) = grown(before.errors[place], link.errors[place]) {
                    found.push(DeviceTrouble::NvlinkErrors {
                        link: link.number,
                        kind,
                        errors,
                    });
                }
            }
        }
    }

    fn pcie(&self, before: Option<&Self>, found: &mut Vec<DeviceTrouble>) {
        if let Some((lanes, most)) = self.pcie_lanes.filter(|(lanes, most)| lanes < most) {
            found.push(DeviceTrouble::PcieWidth { lanes, most });
        }
        let generation = self.pcie_generation.filter(|_| !self.is_idle);
        if let Some((generation, most)) = generation.filter(|(now, most)| now < most) {
            found.push(DeviceTrouble::PcieGeneration { generation, most });
        }
        let replays = before.and_then(|before| {
            let was = before.pcie_replays.map(u64::from);
            grown(was, self.pcie_replays.map(u64::from))
        });
        let replays = replays.and_then(|replays| u32::try_from(replays).ok());
        found.extend(replays.map(DeviceTrouble::PcieReplays));
    }
}

/// Returns by how much a counter has grown.
fn grown(before: Option<u64>, now: Option<u64>) -> Option<u64> {
    now?.checked_sub(before?).filter(|grown| *grown > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn healthy() -> Reading {
        let link = |number| Link {
            number,
            is_active: true,
            errors: [Some(5); 4],
        };
        Reading {
            uncorrected: Some(3),
            links: (0..4).map(link).collect(),
            pcie_lanes: Some((16, 16)),
            pcie_generation: Some((5, 5)),
            pcie_replays: Some(9),
            celsius: Some(40),
            ..Reading::default()
        }
    }

    fn said(now: &Reading, before: Option<&Reading>) -> Vec<String> {
        let troubles = now.troubles(before).into_iter();
        troubles.map(|trouble| trouble.to_string()).collect()
    }

    #[test]
    fn counters_are_trouble_only_as_far_as_they_have_grown() {
        let before = healthy();
        assert_eq!(said(&before, Some(&before)), Vec::<String>::new());
        let mut now = healthy();
        now.uncorrected = Some(5);
        now.links[2].errors[1] = Some(6);
        now.pcie_replays = Some(10);
        assert_eq!(
            said(&now, Some(&before)),
            [
                "2 uncorrected ECC errors since the first communicator",
                "NVLink link 2: recoveries +1 since the first communicator",
                "PCIe replays +1 since the first communicator",
            ]
        );
        // Without an earlier reading, memory errors are reported as the driver counts them, and other counters are not
        // reported.
        assert_eq!(
            said(&now, None),
            ["5 uncorrected ECC errors since the driver was started"]
        );
        // The driver was restarted.
        now.uncorrected = Some(0);
        now.links[2].errors[1] = Some(0);
        now.pcie_replays = None;
        assert_eq!(said(&now, Some(&before)), Vec::<String>::new());
    }

    #[test]
    fn states_are_trouble_by_themselves() {
        let mut now = healthy();
        now.remap_failed = true;
        now.links[1].is_active = false;
        now.pcie_lanes = Some((8, 16));
        now.throttle = vec![ThrottleReason::PowerBrake];
        now.processes = vec![(7, String::from("other"))];
        let expected = [
            "a faulty row of its memory could not be remapped",
            "NVLink link 1 inactive",
            "its PCIe link has 8 of 16 lanes",
            "its clocks are slowed by a power brake of the host, at 40 °C",
            "process 7 (other), which is not of the job, uses it",
        ];
        assert_eq!(said(&now, Some(&now)), expected);
        let state = now.state("0000:3b:00.0", None);
        assert_eq!((state.nvlinks, state.active_nvlinks), (4, 3));
        now.is_lost = true;
        assert_eq!(now.troubles(None), [DeviceTrouble::Lost]);
    }

    #[test]
    fn links_that_were_never_connected_and_an_idle_device_are_fine() {
        let mut now = healthy();
        now.pcie_generation = Some((1, 5));
        now.is_idle = true;
        now.links.iter_mut().for_each(|link| link.is_active = false);
        assert_eq!(said(&now, Some(&now)), Vec::<String>::new());
        assert_eq!(
            said(&now, Some(&healthy())),
            ["NVLink links 0, 1, 2, 3 inactive"]
        );
        now.is_idle = false;
        assert_eq!(
            said(&now, None)[1..],
            ["its PCIe link is of generation 1, and could be of 5"]
        );
    }
}
