//! NVIDIA's Xid numbers, and their meanings.

/// Returns the meaning of Xid `number`, for the numbers that operators encounter; NVIDIA's Xid catalogue has all of
/// them.
pub(super) fn explanation(number: u32) -> Option<&'static str> {
    Some(match number {
        8 | 46 => "the GPU stopped processing",
        13 => {
            "a kernel failed on the GPU, by an illegal instruction or address of the program as a rule"
        }
        31 => "GPU memory page fault, by an illegal address of the program as a rule",
        43 => "the GPU stopped the work of a process after an error of its program",
        45 => "the driver ended the work of a process: it was killed, or another error came before",
        48 => "uncorrectable ECC error in GPU memory",
        61 | 62 => "the GPU's micro-controller halted",
        63 => "GPU memory remapped, or about to be",
        64 => "GPU memory could not be remapped",
        74 => "NVLink error",
        79 => "GPU has fallen off the bus",
        92 => "many corrected ECC errors",
        94 => "contained memory error: the process that was hit has to restart",
        95 => "uncontained memory error: the GPU has to be reset",
        109 => "a context switch on the GPU timed out",
        119 => "the GPU's system processor (GSP) does not answer",
        120 => "the GPU's system processor (GSP) failed",
        121 => "error of the C2C link between GPU and CPU",
        136 => "NVLink training failed",
        137 => "NVLink: access to memory of another GPU refused",
        140 => "unrecovered ECC error",
        143 => "the GPU could not be initialized",
        144..=150 => "NVLink error of a GPU's fabric interface",
        154 => "the GPU needs a recovery, which the text names",
        155 => "NVLink error that the driver's software reports",
        156 => "a resource of the GPU was retired",
        157 => "a resource of the GPU could not be retired",
        _ => return None,
    })
}

/// Returns whether Xid `number` usually follows from a program or the end of its process, and not from the device.
pub(super) fn is_of_program(number: u32) -> bool {
    matches!(number, 13 | 31 | 43 | 45)
}
