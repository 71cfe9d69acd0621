//! Injected states of devices that NVML reports.

use super::specification::SpecificationError;

/// The environment variable.
pub(crate) const VARIABLE: &str = "NCCL_EMULATOR_NVML";

/// Sets the states of devices that NVML reports in this process, from a text in the form of `NCCL_EMULATOR_NVML`, and replaces
/// earlier ones; an empty text makes all devices healthy. Only NVML's reports change: a device that NVML reports as lost still
/// works.
///
/// # Errors
/// [`SpecificationError`] describes the problem in one sentence.
///
/// ```
/// use nccl_emulator::faults;
/// faults::nvml("device=1,ecc=2; device=0,nvlink=3:down; device=1,lost")?;
/// assert!(faults::nvml("device=1,fire").is_err());
/// faults::nvml("")?;
/// # Ok::<(), faults::SpecificationError>(())
/// ```
pub fn nvml(text: &str) -> Result<(), SpecificationError> {
    cuda_emulator::nvml::faults::set(text)
        .map_err(|(entry, problem)| SpecificationError { entry, problem })
}
