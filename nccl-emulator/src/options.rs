//! The options of the emulator: number of devices, their memory, strictness, release, or NVIDIA's own library. They come
//! from the builder, else the environment, else defaults; `install` fixes them for the process.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use nccl_sys::Version;

use crate::installation::InstallError;

/// The number of devices.
pub(crate) const DEVICES: &str = "NCCL_EMULATOR_DEVICES";
/// The memory of each device.
pub(crate) const MEMORY: &str = "NCCL_EMULATOR_MEMORY";
/// Immediate errors where NCCL would hang.
pub(crate) const STRICT: &str = "NCCL_EMULATOR_STRICT";
/// Peers complete what a rank has given up.
pub(crate) const LATE_WRITES: &str = "NCCL_EMULATOR_LATE_WRITES";

/// The duration of an abort that ends connections to other processes, in milliseconds.
pub(crate) const PROXY_POLL: &str = "NCCL_EMULATOR_PROXY_POLL_MS";

/// The length of a second in RAS's timeouts, in milliseconds.
pub(crate) const RAS_SECOND: &str = "NCCL_EMULATOR_RAS_SECOND_MS";

/// The release of NCCL.
pub(crate) const VERSION: &str = "NCCL_EMULATOR_VERSION";

/// The file of NVIDIA's own library, to run on the emulator's driver.
pub(crate) const NCCL: &str = "NCCL_EMULATOR_NCCL";

/// The oldest release that can be emulated.
const OLDEST: Version = Version::new(2, 18, 1);

/// The most devices.
const MAX_DEVICES: u32 = 256;
/// The most memory of all devices together, so that it fits the address space twice.
const MAX_TOTAL: u64 = 1 << 45;
/// Sizes are rounded up to a multiple of this.
const GRAIN: u64 = 2 << 20;
/// The smallest device.
const MIN_MEMORY: u64 = 16 << 20;

/// The options in force for this process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Options {
    /// Number of devices.
    pub(crate) devices: u32,
    /// Memory of each device in bytes, a multiple of 2 MiB.
    pub(crate) memory: u64,
    /// Whether operations fail immediately where NCCL would hang.
    pub(crate) strict: bool,
    /// Whether peers complete what a rank has given up, as writes that are on their way over NVLink.
    pub(crate) late_writes: bool,
    /// How long NCCL's proxy thread polls before it sees an abort.
    pub(crate) proxy_poll: Duration,
    /// The length of a second in RAS's timeouts.
    pub(crate) ras_second: Duration,
    /// The release of NCCL.
    pub(crate) version: Version,
    /// NVIDIA's library, which replaces the emulator's NCCL.
    pub(crate) nccl: Option<PathBuf>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            devices: 8,
            memory: 4 << 30,
            strict: false,
            late_writes: false,
            proxy_poll: Duration::from_millis(500),
            ras_second: Duration::from_secs(1),
            version: Version::HEADER,
            nccl: None,
        }
    }
}

/// The settings of a builder; the rest comes from the environment.
#[derive(Debug, Clone, Default)]
pub(crate) struct Wishes {
    pub(crate) devices: Option<u32>,
    pub(crate) memory: Option<u64>,
    pub(crate) strict: Option<bool>,
    pub(crate) version: Option<Version>,
    pub(crate) nccl: Option<PathBuf>,
    /// Whether to suppress the line on stderr when the emulator is chosen.
    pub(crate) quiet: bool,
}

static OPTIONS: OnceLock<Options> = OnceLock::new();

/// Returns the options of this process. Without `install` (a foreign client of the shared library), they come from the
/// environment.
pub(crate) fn options() -> &'static Options {
    OPTIONS.get_or_init(|| {
        complete(&Wishes::default(), &environment).unwrap_or_else(|error| {
            eprintln!("nccl-emulator: {error}; the default is used instead");
            Options::default()
        })
    })
}

/// Returns the options if they are fixed already.
pub(crate) fn in_force() -> Option<&'static Options> {
    OPTIONS.get()
}

/// Fixes the options of this process.
///
/// # Errors
/// If a value is out of range, or other options are already in force.
pub(crate) fn fix(wishes: &Wishes) -> Result<&'static Options, InstallError> {
    let asked = complete(wishes, &environment)?;
    let in_force = OPTIONS.get_or_init(|| asked.clone());
    let differs = wishes
        .devices
        .is_some_and(|devices| devices != in_force.devices)
        || wishes.memory.is_some() && asked.memory != in_force.memory
        || wishes
            .strict
            .is_some_and(|strict| strict != in_force.strict)
        || wishes
            .version
            .is_some_and(|version| version != in_force.version)
        || wishes.nccl.is_some() && wishes.nccl != in_force.nccl;
    if differs {
        return Err(InstallError::OptionsInForce {
            asked: asked.to_string(),
            in_force: in_force.to_string(),
        });
    }
    Ok(in_force)
}

impl std::fmt::Display for Options {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} devices with {} MiB each",
            self.devices,
            self.memory >> 20
        )?;
        if self.strict {
            f.write_str(", strict")?;
        }
        if let Some(path) = &self.nccl {
            write!(f, ", NVIDIA's NCCL of {}", path.display())?;
        } else if self.version != Version::HEADER {
            write!(f, ", as NCCL {}", self.version)?;
        }
        Ok(())
    }
}

fn environment(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

fn complete(
    wishes: &Wishes,
    environment: &dyn Fn(&str) -> Option<String>,
) -> Result<Options, InstallError> {
    let defaults = Options::default();
    let value = |name: &'static str| environment(name).filter(|value| !value.trim().is_empty());
    let bad = |name: &'static str, value: &str, expected: String| InstallError::BadOption {
        name,
        value: value.to_owned(),
        expected,
    };
    let devices = match (wishes.devices, value(DEVICES)) {
        (Some(devices), _) => devices,
        (None, Some(text)) => text
            .trim()
            .parse()
            .map_err(|_| bad(DEVICES, &text, "a number".into()))?,
        (None, None) => defaults.devices,
    };
    if !(1..=MAX_DEVICES).contains(&devices) {
        return Err(bad(
            DEVICES,
            &devices.to_string(),
            format!("1 to {MAX_DEVICES}"),
        ));
    }
    let memory = match (wishes.memory, value(MEMORY)) {
        (Some(memory), _) => memory,
        (None, Some(text)) => parse_size(&text).ok_or_else(|| {
            bad(
                MEMORY,
                &text,
                "a number of bytes, or one with K, M, G or T: 512M".into(),
            )
        })?,
        (None, None) => defaults.memory,
    };
    let most = MAX_TOTAL / u64::from(devices.next_power_of_two());
    if !(MIN_MEMORY..=most).contains(&memory) {
        let expected = format!(
            "{} MiB to {} GiB for {devices} devices",
            MIN_MEMORY >> 20,
            most >> 30
        );
        return Err(bad(MEMORY, &memory.to_string(), expected));
    }
    let switch = |name, default| match value(name) {
        Some(text) => match text.trim().to_ascii_lowercase().as_str() {
            "1" | "true" | "yes" | "on" => Ok(true),
            "0" | "false" | "no" | "off" => Ok(false),
            _ => Err(bad(name, &text, "0 or 1".into())),
        },
        None => Ok(default),
    };
    let strict = match wishes.strict {
        Some(strict) => strict,
        None => switch(STRICT, defaults.strict)?,
    };
    let late_writes = switch(LATE_WRITES, defaults.late_writes)?;
    let milliseconds = |name, default| match value(name) {
        Some(text) => text
            .trim()
            .parse()
            .map(Duration::from_millis)
            .map_err(|_| bad(name, &text, "a number of milliseconds".into())),
        None => Ok(default),
    };
    let proxy_poll = milliseconds(PROXY_POLL, defaults.proxy_poll)?;
    let ras_second = milliseconds(RAS_SECOND, defaults.ras_second)?;
    if ras_second.is_zero() || ras_second > Duration::from_secs(3600) {
        let given = ras_second.as_millis().to_string();
        let expected = "1 to 3600000 milliseconds".into();
        return Err(bad(RAS_SECOND, &given, expected));
    }
    let nccl = wishes
        .nccl
        .clone()
        .or_else(|| value(NCCL).map(PathBuf::from));
    if nccl.is_some() && strict {
        let expected = format!("nothing beside {NCCL}, whose library answers as it does");
        return Err(bad(STRICT, "1", expected));
    }
    let version = match (wishes.version, value(VERSION)) {
        (version, text) if nccl.is_some() && (version.is_some() || text.is_some()) => {
            let asked = version.map_or_else(|| text.unwrap_or_default(), |asked| asked.to_string());
            let expected =
                format!("nothing beside {NCCL}, whose library is of a release of its own");
            return Err(bad(VERSION, &asked, expected));
        }
        (Some(version), _) => version,
        (None, Some(text)) => parse_version(&text)
            .ok_or_else(|| bad(VERSION, &text, "three numbers: 2.27.7".into()))?,
        (None, None) => defaults.version,
    };
    if !(OLDEST..=Version::HEADER).contains(&version) {
        let expected = format!("a release from {OLDEST} to {}", Version::HEADER);
        return Err(bad(VERSION, &version.to_string(), expected));
    }
    Ok(Options {
        devices,
        memory: memory.next_multiple_of(GRAIN),
        strict,
        late_writes,
        proxy_poll,
        ras_second,
        version,
        nccl,
    })
}

fn parse_version(text: &str) -> Option<Version> {
    let mut numbers = text.trim().split('.').map(str::parse);
    let mut next = || numbers.next()?.ok();
    let version = Version::new(next()?, next()?, next()?);
    numbers.next().is_none().then_some(version)
}

fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let (number, shift) = match text
        .to_ascii_uppercase()
        .trim_end_matches("IB")
        .trim_end_matches('B')
        .chars()
        .last()?
    {
        'K' => (text.find(['k', 'K'])?, 10),
        'M' => (text.find(['m', 'M'])?, 20),
        'G' => (text.find(['g', 'G'])?, 30),
        'T' => (text.find(['t', 'T'])?, 40),
        _ => (text.len(), 0),
    };
    let value: u64 = text[..number].trim().parse().ok()?;
    value.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(values: &[(&str, &str)]) -> Result<Options, InstallError> {
        let values: Vec<_> = values
            .iter()
            .map(|(k, v)| (k.to_string(), v.to_string()))
            .collect();
        complete(&Wishes::default(), &move |name| {
            values
                .iter()
                .find(|(key, _)| key == name)
                .map(|(_, value)| value.clone())
        })
    }

    #[test]
    fn sizes_have_suffixes() {
        assert_eq!(parse_size("1048576"), Some(1 << 20));
        assert_eq!(parse_size("512M"), Some(512 << 20));
        assert_eq!(parse_size(" 2 g "), Some(2 << 30));
        assert_eq!(parse_size("3GiB"), Some(3 << 30));
        assert_eq!(parse_size("64k"), Some(64 << 10));
        for bad in [
            "",
            "M",
            "-1",
            "1.5G",
            "12Q",
            "99999999999999999999",
            "99999999T",
        ] {
            assert_eq!(parse_size(bad), None, "{bad}");
        }
    }

    #[test]
    fn without_settings_there_are_eight_devices_of_4_gib() {
        assert_eq!(
            with(&[]).unwrap(),
            Options {
                devices: 8,
                memory: 4 << 30,
                strict: false,
                late_writes: false,
                proxy_poll: Duration::from_millis(500),
                ras_second: Duration::from_secs(1),
                version: Version::HEADER,
                nccl: None,
            }
        );
        let at_once = with(&[(PROXY_POLL, "0")]).unwrap();
        assert_eq!(at_once.proxy_poll, Duration::ZERO);
        assert_eq!(with(&[(DEVICES, "")]).unwrap().devices, 8);
    }

    #[test]
    fn a_bad_value_is_an_error_that_names_it() {
        for (name, value) in [
            (DEVICES, "many"),
            (DEVICES, "0"),
            (DEVICES, "1000"),
            (MEMORY, "4Q"),
            (MEMORY, "1K"),
            (STRICT, "maybe"),
            (PROXY_POLL, "0.5"),
            (PROXY_POLL, "-1"),
            (RAS_SECOND, "0"),
            (RAS_SECOND, "quick"),
            (VERSION, "2.27"),
            (VERSION, "2.27.7.1"),
            (VERSION, "2.17.1"),
            (VERSION, "2.99.0"),
        ] {
            let error = with(&[(name, value)]).unwrap_err().to_string();
            assert!(error.contains(name), "{error}");
        }
    }

    #[test]
    fn a_release_is_three_numbers() {
        let options = with(&[(VERSION, " 2.27.7")]).unwrap();
        assert_eq!(options.version, Version::new(2, 27, 7));
        assert!(options.to_string().ends_with(", as NCCL 2.27.7"));
    }

    #[test]
    fn the_library_of_nvidia_has_a_release_of_its_own() {
        let options = with(&[(NCCL, "/lib/libnccl.so.2")]).unwrap();
        assert!(options.to_string().contains("/lib/libnccl.so.2"));
        let error = with(&[(NCCL, "/lib/libnccl.so.2"), (VERSION, "2.27.7")]).unwrap_err();
        assert!(error.to_string().contains(VERSION) && error.to_string().contains(NCCL));
    }

    #[test]
    fn what_only_the_emulators_own_nccl_does_is_refused_beside_the_library_of_nvidia() {
        let library = (NCCL, "/lib/libnccl.so.2");
        let error = with(&[library, (STRICT, "1")]).unwrap_err();
        assert!(error.to_string().contains(STRICT) && error.to_string().contains(NCCL));
        assert!(with(&[library, (STRICT, "0")]).is_ok());
        let wishes = Wishes {
            version: Some(Version::HEADER),
            nccl: Some("/lib/libnccl.so.2".into()),
            ..Wishes::default()
        };
        assert!(complete(&wishes, &|_| None).is_err());
    }

    #[test]
    fn the_builder_goes_before_the_environment() {
        let wishes = Wishes {
            devices: Some(2),
            ..Wishes::default()
        };
        let options = complete(&wishes, &|_| Some("3".into()).filter(|_| false)).unwrap();
        assert_eq!(options.devices, 2);
    }

    #[test]
    fn memory_is_rounded_up_to_huge_pages() {
        assert_eq!(with(&[(MEMORY, "17000K")]).unwrap().memory % GRAIN, 0);
    }
}
