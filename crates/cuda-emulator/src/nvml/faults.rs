//! Injected states of devices, as NVML reports them: the parser of their specification, and the states in force.
//!
//! ```text
//! device=1,ecc=2; device=0,nvlink=3:down; device=1,lost; hang
//! ```
//!
//! Entries are separated by semicolons, and the items of an entry by commas. An entry applies to one device, by its number on
//! the host, or to all devices. `after=MS` delays an entry by that many milliseconds after it was set. Entries for the same
//! device are combined.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::sync::Mutex;

/// The number of links of a device that has NVLink: that of a Hopper.
pub(super) const LINKS: u32 = 18;

/// The kinds of NVLink's counters, in NVML's order.
const COUNTERS: [&str; 4] = ["replay", "recovery", "crc", "crc-data"];

/// The state of one device; the default one is healthy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct State {
    pub(super) is_lost: bool,
    pub(super) hangs: bool,
    /// Volatile uncorrected errors.
    pub(super) ecc: u64,
    pub(super) remap_pending: bool,
    pub(super) remap_failed: bool,
    pub(super) retirement_pending: bool,
    /// Whether the device has NVLink; by default it has none.
    pub(super) has_links: bool,
    pub(super) down: Vec<u32>,
    /// Errors by link and kind.
    pub(super) link_errors: BTreeMap<(u32, u32), u64>,
    pub(super) pcie_width: u32,
    pub(super) pcie_generation: u32,
    pub(super) pcie_replays: u32,
    /// Bits of `nvmlClocksEventReasons`.
    pub(super) throttle: u64,
    pub(super) celsius: u32,
    pub(super) processes: Vec<u32>,
}

/// The PCI Express of a Hopper: the speed of the link in megabytes per second, its generation and its width.
pub(super) const PCIE: (u32, u32, u32) = (32_000, 5, 16);

impl Default for State {
    fn default() -> Self {
        Self {
            is_lost: false,
            hangs: false,
            ecc: 0,
            remap_pending: false,
            remap_failed: false,
            retirement_pending: false,
            has_links: false,
            down: Vec::new(),
            link_errors: BTreeMap::new(),
            pcie_width: PCIE.2,
            pcie_generation: PCIE.1,
            pcie_replays: 0,
            throttle: 0,
            celsius: 35,
            processes: Vec::new(),
        }
    }
}

/// The changes of one entry.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Entry {
    /// `None` for all devices.
    device: Option<u32>,
    after: Duration,
    items: Vec<Item>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Item {
    Lost,
    Hang,
    Ecc(u64),
    RemapPending,
    RemapFailed,
    RetirementPending,
    Links,
    LinkDown(u32),
    LinkErrors(u32, u32, u64),
    PcieWidth(u32),
    PcieGeneration(u32),
    PcieReplays(u32),
    Throttle(u64),
    Celsius(u32),
    Process(u32),
}

impl Item {
    fn apply(self, state: &mut State) {
        match self {
            Self::Lost => state.is_lost = true,
            Self::Hang => state.hangs = true,
            Self::Ecc(errors) => state.ecc = errors,
            Self::RemapPending => state.remap_pending = true,
            Self::RemapFailed => state.remap_failed = true,
            Self::RetirementPending => state.retirement_pending = true,
            Self::Links => state.has_links = true,
            Self::LinkDown(link) => {
                state.has_links = true;
                state.down.push(link);
            }
            Self::LinkErrors(link, kind, errors) => {
                state.has_links = true;
                state.link_errors.insert((link, kind), errors);
            }
            Self::PcieWidth(width) => state.pcie_width = width,
            Self::PcieGeneration(generation) => state.pcie_generation = generation,
            Self::PcieReplays(replays) => state.pcie_replays = replays,
            Self::Throttle(reason) => state.throttle |= reason,
            Self::Celsius(celsius) => state.celsius = celsius,
            Self::Process(pid) => state.processes.push(pid),
        }
    }
}

/// The entries in force, and the time at which they were set.
static IN_FORCE: Mutex<Option<(Instant, Vec<Entry>)>> = Mutex::new(None);

/// Replaces all injected states by those of a specification.
///
/// # Errors
/// The invalid entry and the problem; the states remain unchanged.
pub fn set(text: &str) -> Result<(), (String, String)> {
    let entries = parse(text)?;
    *IN_FORCE.lock() = (!entries.is_empty()).then(|| (Instant::now(), entries));
    Ok(())
}

/// Returns the present state of a device, by its number on this host.
pub(super) fn state_of(device: u32) -> State {
    let mut state = State::default();
    if let Some((since, entries)) = &*IN_FORCE.lock() {
        let age = since.elapsed();
        entries
            .iter()
            .filter(|entry| entry.device.is_none_or(|of| of == device) && age >= entry.after)
            .flat_map(|entry| &entry.items)
            .for_each(|item| item.apply(&mut state));
    }
    state
}

fn parse(text: &str) -> Result<Vec<Entry>, (String, String)> {
    text.split(';')
        .map(str::trim)
        .filter(|entry| !entry.is_empty())
        .map(|entry| parse_entry(entry).map_err(|problem| (entry.to_owned(), problem)))
        .collect()
}

fn parse_entry(text: &str) -> Result<Entry, String> {
    let mut entry = Entry::default();
    for field in text.split(',').map(str::trim) {
        match field.split_once('=') {
            Some(("device", value)) => entry.device = Some(number(value)?),
            Some(("after", value)) => {
                entry.after = Duration::from_millis(number(value.trim_end_matches("ms"))?);
            }
            _ => entry.items.push(parse_item(field)?),
        }
    }
    match (entry.items.is_empty(), &entry.items[..], entry.device) {
        (true, ..) => Err(String::from("it says nothing of the device")),
        (_, [Item::Hang], None) | (_, _, Some(_)) => Ok(entry),
        _ => Err(String::from("it says no device=N")),
    }
}

fn parse_item(text: &str) -> Result<Item, String> {
    let (key, value) = text.split_once('=').unwrap_or((text, ""));
    Ok(match (key, value) {
        ("lost", "") => Item::Lost,
        ("hang", "") => Item::Hang,
        ("ecc", count) => Item::Ecc(number(count)?),
        ("row-remap", "pending") => Item::RemapPending,
        ("row-remap", "failed") => Item::RemapFailed,
        ("retired-pages", "pending") => Item::RetirementPending,
        ("nvlink", link) => parse_link(link)?,
        ("pcie-width", width) => Item::PcieWidth(number(width)?),
        ("pcie-generation", generation) => Item::PcieGeneration(number(generation)?),
        ("pcie-replays", replays) => Item::PcieReplays(number(replays)?),
        ("throttle", "slowdown") => Item::Throttle(0x08),
        ("throttle", "software-thermal") => Item::Throttle(0x20),
        ("throttle", "thermal") => Item::Throttle(0x40),
        ("throttle", "power-brake") => Item::Throttle(0x80),
        ("temperature", celsius) => Item::Celsius(number(celsius)?),
        ("process", pid) => Item::Process(number(pid)?),
        _ => {
            return Err(format!(
                "\"{text}\" is none of lost, hang, ecc=N, row-remap=pending, row-remap=failed, retired-pages=pending, \
                 nvlink=up, nvlink=LINK:down, nvlink=LINK:replay:N (recovery, crc, crc-data), pcie-width=N, \
                 pcie-generation=N, pcie-replays=N, throttle=thermal (software-thermal, power-brake, slowdown), \
                 temperature=N, process=PID"
            ));
        }
    })
}

fn parse_link(text: &str) -> Result<Item, String> {
    let mut parts = text.split(':');
    let first = parts.next().unwrap_or_default();
    if text == "up" {
        return Ok(Item::Links);
    }
    let link: u32 = number(first)?;
    if link >= LINKS {
        return Err(format!("a device has the links 0 to {}", LINKS - 1));
    }
    let item = match (parts.next(), parts.next(), parts.next()) {
        (Some("down"), None, None) => Some(Item::LinkDown(link)),
        (Some(kind), Some(count), None) => {
            let place = COUNTERS.iter().position(|known| *known == kind);
            let place = place.and_then(|place| u32::try_from(place).ok());
            match place {
                Some(kind) => Some(Item::LinkErrors(link, kind, number(count)?)),
                None => None,
            }
        }
        _ => None,
    };
    item.ok_or_else(|| {
        format!(
            "\"{text}\" is neither up, LINK:down nor LINK:KIND:N of {}",
            COUNTERS.join(", ")
        )
    })
}

fn number<N: std::str::FromStr>(text: &str) -> Result<N, String> {
    text.trim()
        .parse()
        .map_err(|_| format!("\"{text}\" is no such number"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn applied(text: &str, device: u32) -> State {
        let mut state = State::default();
        for entry in parse(text).unwrap() {
            if entry.device.is_none_or(|of| of == device) {
                entry.items.iter().for_each(|item| item.apply(&mut state));
            }
        }
        state
    }

    #[test]
    fn entries_of_one_device_add_up_and_leave_the_others_healthy() {
        let text =
            "device=1,ecc=2; device=0,nvlink=3:down; device=1,lost,nvlink=0:crc:7,throttle=thermal";
        let one = applied(text, 1);
        assert_eq!((one.ecc, one.is_lost, one.throttle), (2, true, 0x40));
        assert_eq!(one.link_errors.get(&(0, 2)), Some(&7));
        let zero = applied(text, 0);
        assert_eq!((zero.has_links, &zero.down[..]), (true, &[3][..]));
        assert_eq!(applied(text, 2), State::default());
        assert!(applied("hang", 5).hangs);
        assert!(!applied("device=1,hang", 5).hangs);
    }

    #[test]
    fn what_is_not_understood_is_named() {
        for (text, entry, problem) in [
            ("device=1,ecc=2; ecc=3", "ecc=3", "no device=N"),
            ("device=1", "device=1", "nothing"),
            (
                "device=1,nvlink=18:down",
                "device=1,nvlink=18:down",
                "0 to 17",
            ),
            (
                "device=1,nvlink=1:odd:3",
                "device=1,nvlink=1:odd:3",
                "LINK:KIND:N",
            ),
            ("device=x,lost", "device=x,lost", "number"),
            ("device=1,fire", "device=1,fire", "none of lost"),
            ("", "", ""),
        ] {
            match parse(text) {
                Ok(entries) => assert!(entries.is_empty() && text.is_empty(), "{text}"),
                Err((of, why)) => {
                    assert_eq!(of, entry);
                    assert!(why.contains(problem), "{why}");
                }
            }
        }
    }

    #[test]
    fn an_entry_begins_after_its_time() {
        let entries = parse("device=1,after=60000,lost;device=1,ecc=1").unwrap();
        assert_eq!(entries[0].after, Duration::from_secs(60));
        assert_eq!(entries[1].after, Duration::ZERO);
    }
}
