//! The resources of one rank in its own process: libnccl, the driver, and a device.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream};
use nccl::preflight::{Finding, Settings};
use nccl::{Capability, Library};

use crate::perf::cudarc_finds_libcuda;

/// The resources, and the findings about them.
pub(super) struct Local {
    pub(super) entries: Vec<Finding>,
    pub(super) stream: Option<Arc<CudaStream>>,
    library: Option<Library>,
}

impl Local {
    /// Looks for all resources. `local_rank` is the rank's index on its host, which a launcher has set.
    pub(super) fn look(local_rank: usize, launched: bool) -> Self {
        let mut entries = Vec::new();
        let library = match Library::load() {
            Ok(library) => {
                entries.extend(lacking(&library));
                Some(library)
            }
            Err(error) => {
                entries.push(missing(&error.to_string()));
                None
            }
        };
        let stream = match device(local_rank, launched) {
            Ok((stream, entry)) => {
                entries.push(entry);
                Some(stream)
            }
            Err(entry) => {
                entries.push(*entry);
                None
            }
        };
        Self {
            entries,
            stream,
            library,
        }
    }

    /// The settings of the checks that follow.
    pub(super) fn settings(&self) -> Settings {
        Settings::default().with(|settings| {
            settings.library.clone_from(&self.library);
            settings.stream.clone_from(&self.stream);
        })
    }
}

/// Features that an old release lacks. Preflight reports the release, and whether all ranks have the same.
fn lacking(library: &Library) -> Option<Finding> {
    let lacking = Capability::ALL.iter().filter(|one| !library.has(**one));
    let lacking: Vec<_> = lacking.map(ToString::to_string).collect();
    let what = format!(
        "NCCL {} is too old for {}",
        library.version(),
        lacking.join(", ")
    );
    (!lacking.is_empty()).then(|| Finding::ok("library", what))
}

/// The finding when no library was found: the error lists the places where it was looked for, and ends with the fix.
fn missing(error: &str) -> Finding {
    let mut lines: Vec<&str> = error.lines().map(str::trim).collect();
    let fix = if lines.len() > 1 { lines.pop() } else { None };
    let fix = fix.unwrap_or("name the file of libnccl in NCCL_LIBRARY");
    let what = lines.join(" ");
    let packages = "NVIDIA's packages are libnccl2, and nvidia-nccl-cu13 for pip";
    Finding::error("library", what).fix(format!("{fix}; {packages}"))
}

/// A stream on the device that the rank would use.
pub(super) fn device(
    local_rank: usize,
    launched: bool,
) -> Result<(Arc<CudaStream>, Finding), Box<Finding>> {
    if !cudarc_finds_libcuda() {
        let fix =
            "install NVIDIA's driver; in a container, start it with --gpus all or its runtime";
        let entry = Finding::error("driver", "there is no CUDA driver: libcuda.so is not found");
        return Err(Box::new(entry.fix(fix)));
    }
    let failed = |what: &str, error: cudarc::driver::DriverError| {
        let fix =
            "nvidia-smi has to work here, and the driver must not be older than libnccl's CUDA";
        let entry = Finding::error("driver", format!("{what}: CUDA says {error}"));
        Box::new(entry.fix(fix))
    };
    let count =
        CudaContext::device_count().map_err(|error| failed("counting the devices", error))?;
    let count = usize::try_from(count).unwrap_or(0);
    // A launcher may have made one device visible to each rank.
    let index = match count {
        1 if launched => 0,
        _ => local_rank,
    };
    if index >= count {
        let what = format!(
            "the rank that is number {} on its host finds {count} devices",
            local_rank + 1
        );
        let fix = "start fewer ranks on that host, or let CUDA_VISIBLE_DEVICES show more devices";
        return Err(Box::new(Finding::error("device", what).fix(fix)));
    }
    let context = CudaContext::new(index)
        .map_err(|error| failed(&format!("opening device {index}"), error))?;
    let name = context.name().unwrap_or_default();
    let stream = context
        .new_stream()
        .map_err(|error| failed(&format!("a stream on device {index}"), error))?;
    // Without the index, so that the entries of all ranks with the same kind of device are equal.
    let devices = if count == 1 {
        "the only device".to_owned()
    } else {
        format!("one of {count} devices")
    };
    let what = format!("takes {devices}: {name}");
    Ok((stream, Finding::ok("devices", what)))
}
