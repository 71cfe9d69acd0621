//! The limits of a job: larger numbers are mistakes, detected before memory is allocated or anything is sent.

/// The most ranks: every rank keeps some hundred bytes for each of them.
const RANKS: usize = 1 << 20;
/// The largest generation, which leaves numbers for the attempts after it.
const GENERATION: u64 = u64::MAX >> 1;
/// The longest job name in bytes: it has to fit into a rank's first message ([`LARGEST_HANDSHAKE_MESSAGE`](super::frame::LARGEST_HANDSHAKE_MESSAGE)), beside host and
/// address.
const JOB: usize = 2048;
/// The shortest secret in bytes: 128 bits, not guessable if every bit is random.
const SECRET: usize = 16;

/// The most witnesses of a job: more than one for each network that may be cut have no use.
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

/// Returns an error for an invalid name or attempt of a job.
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

/// Returns an error if these bytes, which `what` names, are no valid secret.
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
