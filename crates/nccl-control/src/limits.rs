//! The limits of a job: a larger number is a mistake, which is detected before memory is allocated or anything is sent.

/// The maximum number of ranks; every rank keeps a few hundred bytes for each of them.
const RANKS: usize = 1 << 20;
/// The largest generation, which leaves room for later attempts.
const GENERATION: u64 = u64::MAX >> 1;
/// The longest job name in bytes: it must fit into a rank's first message
/// ([`LARGEST_HANDSHAKE_MESSAGE`](super::frame::LARGEST_HANDSHAKE_MESSAGE)), beside host and address.
const JOB: usize = 2048;
/// The shortest secret in bytes: 128 bits, which cannot be guessed if every bit is random.
const SECRET: usize = 16;

/// The maximum number of witnesses of a job: more than one for each network that may be partitioned is of no use.
pub(super) const WITNESSES: u32 = 64;

/// Returns an error for a world that is too large.
pub fn size(ranks: usize) -> Result<(), String> {
    match ranks {
        ..=RANKS => Ok(()),
        _ => Err(format!(
            "a world of {ranks} ranks is too large: {RANKS} is the most"
        )),
    }
}

/// Returns an error for an invalid job name or generation.
pub fn job(name: &str, generation: u64) -> Result<(), String> {
    if generation > GENERATION {
        return Err(format!(
            "generation {generation} is too large: {GENERATION} is the last; count attempts from 0"
        ));
    }
    if name.len() > JOB {
        let begin: String = name.chars().take(32).collect();
        return Err(format!(
            "the name of the job ({begin:?} …) has {} bytes, and {JOB} is the most: set a shorter one (NCCL_RUN_JOB)",
            name.len()
        ));
    }
    Ok(())
}

/// Returns an error if `bytes` are not a valid secret; `what` names them in the error.
pub fn secret(what: &str, bytes: &[u8]) -> Result<(), String> {
    let wrong = match bytes.trim_ascii().len() {
        SECRET.. => return Ok(()),
        0 => String::from("is empty"),
        few => format!("has {few} bytes"),
    };
    Err(format!(
        "{what} {wrong}, and {SECRET} random ones are the least: make one with (umask 077; openssl rand -hex 32 > FILE) and \
         name that file in NCCL_RUN_SECRET_FILE, or leave it out"
    ))
}
