//! What the emulator pretends to be: number of devices, memory, strictness. From the builder, else the environment.

/// The options in force for this process; fixed at the first use or by `install`.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    /// Number of devices.
    pub(crate) devices: u32,
    /// Memory of each device in bytes, a multiple of 2 MiB.
    pub(crate) memory: u64,
    /// Prompt errors where NCCL would hang.
    pub(crate) strict: bool,
}

/// The options of this process.
pub(crate) fn options() -> &'static Options {
    todo!()
}
