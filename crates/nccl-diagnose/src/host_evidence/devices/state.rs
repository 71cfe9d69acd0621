//! What NVML reports of devices, as data that goes to other ranks.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::host_evidence::kernel_event::{LONG, SHORT, shown};

/// Maximum number of devices of a host, and of troubles of each.
pub(super) const MOST_DEVICES: usize = 32;
const MOST_TROUBLES: usize = 16;

/// Maximum number of links of a device that are listed.
pub(super) const MOST_LINKS: usize = 32;

/// What NVML reports about devices.
///
/// ```
/// let devices = nccl::host_evidence::HostEvidence::of_host().devices;
/// for device in &devices.list {
///     println!("{device}");
/// }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Devices {
    /// Whether NVML has answered.
    pub access: NvmlAccess,
    /// The devices, also those without trouble.
    #[serde(default)]
    pub list: Vec<DeviceState>,
}

/// Whether NVML has answered.
///
/// ```
/// use nccl::host_evidence::NvmlAccess;
/// assert_eq!(NvmlAccess::NoAnswer.to_string(), "NVML did not answer");
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum NvmlAccess {
    /// It was not queried: `nccl` was built without its feature `nvml`, `NCCL_RUN_NVML` is 0, or no communicator was
    /// made yet.
    #[default]
    NotAsked,
    /// It had not started yet.
    Starting,
    /// It has answered.
    Answered,
    /// It did not answer in time, as happens when a device has failed.
    NoAnswer,
    /// It is not installed, or does not start, for this reason.
    Absent(String),
}

impl fmt::Display for NvmlAccess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAsked => f.write_str("NVML was not asked"),
            Self::Starting => f.write_str("NVML had not started yet"),
            Self::Answered => f.write_str("NVML answered"),
            Self::NoAnswer => f.write_str("NVML did not answer"),
            Self::Absent(why) => write!(f, "there is no NVML here: {why}"),
        }
    }
}

/// The state of one device.
///
/// ```
/// # fn example(device: &nccl::host_evidence::DeviceState) {
/// println!("{} has {} troubles", device.bus_id, device.troubles.len());
/// # }
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DeviceState {
    /// The PCI address: `0000:3b:00.0`.
    pub bus_id: String,
    /// What is wrong with it.
    #[serde(default)]
    pub troubles: Vec<DeviceTrouble>,
    /// The number of its NVLink links; 0 for a device without NVLink.
    #[serde(default)]
    pub nvlinks: u32,
    /// The number of its NVLink links that are active.
    #[serde(default)]
    pub active_nvlinks: u32,
}

/// What is wrong with a device.
///
/// ```
/// use nccl::host_evidence::DeviceTrouble;
/// assert_eq!(DeviceTrouble::RowRemapPending.to_string(), "a row of its memory is to be remapped at its next reset");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum DeviceTrouble {
    /// The driver does not reach it: it has fallen off the bus, or has to be reset.
    Lost,
    /// NVML does not find it, or cannot report on it, for this reason.
    Unreadable(String),
    /// Errors of its memory that ECC could not correct.
    UncorrectedEcc {
        /// Their number.
        errors: u64,
        /// Whether the errors are counted from the start of the driver, because no earlier count is known, and not from
        /// the first communicator.
        since_driver_start: bool,
    },
    /// A faulty row of its memory could not be remapped.
    RowRemapFailed,
    /// A faulty row of its memory is to be remapped at the next reset.
    RowRemapPending,
    /// Faulty pages of its memory are to be retired when the driver starts again.
    RetirementPending,
    /// NVLink links that are not active, while others are active or these were before.
    InactiveNvlinks(Vec<u32>),
    /// Errors of a link of NVLink since the first communicator.
    NvlinkErrors {
        /// The link.
        link: u32,
        /// Their kind.
        kind: NvlinkError,
        /// Their number.
        errors: u64,
    },
    /// Its PCIe link has fewer lanes than device and slot support.
    PcieWidth {
        /// Current number of lanes.
        lanes: u32,
        /// Maximum number of lanes.
        most: u32,
    },
    /// Its PCIe link is slower than device and slot support, while the device is not idle.
    PcieGeneration {
        /// Current generation.
        generation: u32,
        /// Maximum generation.
        most: u32,
    },
    /// Packets that its PCIe link has sent again since the first communicator.
    PcieReplays(u32),
    /// Its clocks are slow.
    Throttled {
        /// The reason.
        reason: ThrottleReason,
        /// Its temperature in degrees Celsius.
        celsius: Option<u32>,
    },
    /// A process uses it that is neither this process nor one of its descendants.
    OtherProcess {
        /// The process, by its number in this process's PID namespace.
        pid: u32,
        /// Its name.
        name: String,
    },
}

/// A kind of error of a link.
///
/// ```
/// assert_eq!(nccl::host_evidence::NvlinkError::Recovery.to_string(), "recoveries");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum NvlinkError {
    /// Data was sent again.
    Replay,
    /// The link was trained again.
    Recovery,
    /// A checksum of a flow control unit was wrong.
    CrcFlit,
    /// A checksum of data was wrong.
    CrcData,
}

impl fmt::Display for NvlinkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Replay => "replays",
            Self::Recovery => "recoveries",
            Self::CrcFlit => "CRC errors (flit)",
            Self::CrcData => "CRC errors (data)",
        })
    }
}

/// Why the clocks of a device are slow.
///
/// ```
/// assert_eq!(nccl::host_evidence::ThrottleReason::PowerBrake.to_string(), "a power brake of the host");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ThrottleReason {
    /// It is too hot, and the hardware has halved its clocks.
    Thermal,
    /// It is too hot, and the driver has reduced its clocks.
    SoftwareThermal,
    /// The host's power supply demands it.
    PowerBrake,
    /// The hardware reduces them, for a reason that it does not report.
    Hardware,
}

impl fmt::Display for ThrottleReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Thermal => "heat, seen by the hardware",
            Self::SoftwareThermal => "heat, seen by the driver",
            Self::PowerBrake => "a power brake of the host",
            Self::Hardware => "the hardware",
        })
    }
}

impl DeviceTrouble {
    /// Returns whether the device has to be reset or repaired before it is used, or works with reduced capability.
    ///
    /// ```
    /// use nccl::host_evidence::DeviceTrouble;
    /// assert!(DeviceTrouble::RowRemapFailed.is_defect());
    /// assert!(!DeviceTrouble::PcieReplays(3).is_defect());
    /// ```
    #[must_use]
    pub fn is_defect(&self) -> bool {
        matches!(
            self,
            Self::Lost
                | Self::RowRemapFailed
                | Self::RowRemapPending
                | Self::RetirementPending
                | Self::InactiveNvlinks(_)
                | Self::PcieWidth { .. }
        )
    }

    fn bound(&mut self) {
        match self {
            Self::Unreadable(why) => *why = shown(why, LONG),
            Self::OtherProcess { name, .. } => *name = shown(name, SHORT),
            Self::InactiveNvlinks(links) => links.truncate(MOST_LINKS),
            _ => {}
        }
    }
}

impl fmt::Display for DeviceTrouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Lost => f.write_str("the driver does not reach it any more (GPU is lost)"),
            Self::Unreadable(why) => write!(f, "NVML says nothing of it: {why}"),
            Self::UncorrectedEcc {
                errors,
                since_driver_start,
            } => {
                let since = match since_driver_start {
                    true => "the driver was started",
                    false => "the first communicator",
                };
                let what = if *errors == 1 { "error" } else { "errors" };
                write!(f, "{errors} uncorrected ECC {what} since {since}")
            }
            Self::RowRemapFailed => f.write_str("a faulty row of its memory could not be remapped"),
            Self::RowRemapPending => {
                f.write_str("a row of its memory is to be remapped at its next reset")
            }
            Self::RetirementPending => {
                f.write_str("pages of its memory are to be retired at the driver's next start")
            }
            Self::InactiveNvlinks(links) => {
                let word = if links.len() == 1 { "link" } else { "links" };
                let links: Vec<String> = links.iter().map(ToString::to_string).collect();
                write!(f, "NVLink {word} {} inactive", links.join(", "))
            }
            Self::NvlinkErrors { link, kind, errors } => {
                write!(
                    f,
                    "NVLink link {link}: {kind} +{errors} since the first communicator"
                )
            }
            Self::PcieWidth { lanes, most } => {
                write!(f, "its PCIe link has {lanes} of {most} lanes")
            }
            Self::PcieGeneration { generation, most } => {
                write!(
                    f,
                    "its PCIe link is of generation {generation}, and could be of {most}"
                )
            }
            Self::PcieReplays(replays) => {
                write!(f, "PCIe replays +{replays} since the first communicator")
            }
            Self::Throttled { reason, celsius } => {
                write!(f, "its clocks are slowed by {reason}")?;
                match celsius {
                    Some(celsius) => write!(f, ", at {celsius} °C"),
                    None => Ok(()),
                }
            }
            Self::OtherProcess { pid, name } => {
                write!(
                    f,
                    "process {pid} ({name}), which is not of the job, uses it"
                )
            }
        }
    }
}

impl fmt::Display for DeviceState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "device {}", self.bus_id)?;
        let troubles: Vec<String> = self.troubles.iter().map(ToString::to_string).collect();
        match troubles.is_empty() {
            true => Ok(()),
            false => write!(f, ": {}", troubles.join(", ")),
        }
    }
}

impl Devices {
    /// Returns whether a device has trouble, or NVML did not answer.
    ///
    /// ```
    /// let is_healthy = !nccl::host_evidence::HostEvidence::of_host().devices.shows_trouble();
    /// ```
    #[must_use]
    pub fn shows_trouble(&self) -> bool {
        self.access == NvmlAccess::NoAnswer
            || self.list.iter().any(|device| !device.troubles.is_empty())
    }

    /// Bounds and sanitises values from another process.
    pub(in crate::host_evidence) fn bound(&mut self) {
        if let NvmlAccess::Absent(why) = &mut self.access {
            *why = shown(why, LONG);
        }
        self.list.truncate(MOST_DEVICES);
        for device in &mut self.list {
            device.bus_id = shown(&device.bus_id, SHORT);
            device.troubles.truncate(MOST_TROUBLES);
            device.troubles.iter_mut().for_each(DeviceTrouble::bound);
        }
    }
}

/// Selects the devices of a question.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(
    not(any(feature = "nvml", test)),
    allow(dead_code, reason = "nothing is asked without the feature")
)]
pub(in crate::host_evidence) enum Which {
    /// The devices on which communicators were made, with the growth of their counters.
    Watched,
    /// One device, by its PCI address.
    One(String),
    /// All devices that NVML shows.
    All,
}

/// Bounds and sanitises the state of a device of another process.
#[doc(hidden)]
pub fn bound(devices: &mut Devices) {
    devices.bound();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_goes_through_json_and_through_the_codec_of_the_ranks() {
        let troubles = vec![
            DeviceTrouble::Lost,
            DeviceTrouble::UncorrectedEcc {
                errors: 2,
                since_driver_start: false,
            },
            DeviceTrouble::InactiveNvlinks(vec![3, 4]),
            DeviceTrouble::NvlinkErrors {
                link: 3,
                kind: NvlinkError::CrcFlit,
                errors: 7,
            },
            DeviceTrouble::Throttled {
                reason: ThrottleReason::Thermal,
                celsius: Some(91),
            },
        ];
        let device = DeviceState {
            bus_id: String::from("0000:3b:00.0"),
            troubles,
            nvlinks: 18,
            active_nvlinks: 16,
        };
        let devices = Devices {
            access: NvmlAccess::Answered,
            list: vec![device],
        };
        let json = serde_json::to_string(&devices).unwrap();
        assert_eq!(serde_json::from_str::<Devices>(&json).unwrap(), devices);
        let bytes = nccl_base::wire::encode(&devices);
        assert_eq!(
            nccl_base::wire::decode::<Devices>(&bytes),
            Ok(devices.clone())
        );
        assert_eq!(
            devices.list[0].to_string(),
            "device 0000:3b:00.0: the driver does not reach it any more (GPU is lost), 2 uncorrected ECC errors since the \
             first communicator, NVLink links 3, 4 inactive, NVLink link 3: CRC errors (flit) +7 since the first \
             communicator, its clocks are slowed by heat, seen by the hardware, at 91 °C"
        );
    }

    #[test]
    fn what_another_process_says_is_cut_and_sanitised() {
        let trouble = || DeviceTrouble::OtherProcess {
            pid: 1,
            name: "\x1b[2J".repeat(1000),
        };
        let device = |_| DeviceState {
            bus_id: "x\n".repeat(1000),
            troubles: (0..1000).map(|_| trouble()).collect(),
            ..DeviceState::default()
        };
        let mut devices = Devices {
            access: NvmlAccess::Absent("\x07".repeat(1000)),
            list: (0..1000).map(device).collect(),
        };
        devices.bound();
        let json = serde_json::to_string(&devices).unwrap();
        assert!(json.len() < 200_000, "{}", json.len());
        assert!(!json.contains("\\u001b") && !json.contains("\\u0007"));
    }
}
