//! What a job may be at most: numbers beyond these are mistakes, found before memory is taken or anything is sent.

/// Every rank keeps some hundred bytes for each of them.
const RANKS: usize = 1 << 20;
/// There are numbers left for the attempts behind it.
const EPOCH: u64 = u64::MAX >> 1;
/// It has to fit into the first message of a rank ([`GREETING`](super::frame::GREETING)), beside host and address.
const JOB: usize = 2048;
/// 128 bits, if every bit is random: what cannot be guessed.
const SECRET: usize = 16;

/// The most witnesses of a job: more than one for each network that may be cut serve nothing.
pub(super) const WITNESSES: u32 = 64;

/// Why there is no world of this size.
pub fn size(ranks: usize) -> Result<(), String> {
    match ranks {
        ..=RANKS => Ok(()),
        _ => Err(format!(
            "a world of {ranks} ranks is too large: {RANKS} is the most"
        )),
    }
}

/// Why there is no job of this name with such an attempt.
pub fn job(name: &str, epoch: u64) -> Result<(), String> {
    if epoch > EPOCH {
        return Err(format!(
            "epoch {epoch} is too large: {EPOCH} is the last; count attempts from 0"
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

/// Why these bytes, which `what` names, are no secret for a job.
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
