//! States of devices that NVML is to report.

use super::specification::SpecificationError;

/// The environment variable.
pub(crate) const VARIABLE: &str = "NCCL_EMULATOR_NVML";

/// Sets the states of devices that NVML reports in this process to those of a text in the form of `NCCL_EMULATOR_NVML`, in the place of
/// earlier ones; an empty text makes all devices healthy. Nothing else changes: a device that NVML calls lost goes on.
///
/// # Errors
/// [`SpecificationError`] says in one sentence what is wrong with it.
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
