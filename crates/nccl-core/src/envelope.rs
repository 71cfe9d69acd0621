//! The wrapping in which NCCL's token travels from the rank that made it to the others.
//!
//! A token of another job or attempt, or a damaged one, would make NCCL connect to nowhere for a minute.
//! The envelope says which job, epoch and communicator it is for, and ends with a checksum.

use nccl_base::codec::{Broken, Fields, checksum, put_bytes, put_number};

use crate::error::{Error, Result};
use crate::peers::Peers;
use crate::unique_id::UniqueId;

const MAGIC: [u8; 8] = *b"ncclid.1";

/// Of the communicator `name` of a job's attempt.
pub(crate) fn seal(job: &str, epoch: u64, name: &str, id: &UniqueId) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    put_bytes(&mut bytes, job.as_bytes());
    put_number(&mut bytes, epoch);
    put_bytes(&mut bytes, name.as_bytes());
    bytes.extend_from_slice(id.as_bytes());
    let sum = checksum(&bytes);
    put_number(&mut bytes, sum);
    bytes
}

/// What [`seal`] sealed for the same.
pub(crate) fn open(job: &str, epoch: u64, name: &str, bytes: &[u8]) -> Result<UniqueId, String> {
    let parse = || {
        let sealed = bytes.len().checked_sub(8).ok_or(Broken("cut off"))?;
        let mut fields = Fields(bytes);
        let magic: [u8; 8] = fields.array()?;
        let found = (fields.text()?, fields.number()?, fields.text()?);
        let id: [u8; UniqueId::LEN] = fields.array()?;
        let sum = fields.number()?;
        fields.end()?;
        let whole = magic == MAGIC && sum == checksum(&bytes[..sealed]);
        Ok((whole, found, id))
    };
    match parse() {
        Err(Broken(_)) | Ok((false, ..)) => Err(format!("it is damaged ({} bytes)", bytes.len())),
        Ok((true, found, _)) if found != (job.to_owned(), epoch, name.to_owned()) => Err(format!(
            "it is for {:?} of job {:?}, epoch {}, and this is {name:?} of job {job:?}, epoch {epoch}",
            found.2, found.0, found.1
        )),
        Ok((true, _, id)) => Ok(UniqueId::from_bytes(id)),
    }
}

/// The token for communicator `name`, to send to the other ranks of the line.
pub(crate) fn seal_on(peers: &dyn Peers, name: &str, id: &UniqueId) -> Vec<u8> {
    let (job, epoch) = peers.job();
    seal(job, epoch, name, id)
}

/// The token that was sealed for communicator `name` of the line's job and epoch.
pub(crate) fn open_on(peers: &dyn Peers, name: &str, bytes: &[u8]) -> Result<UniqueId> {
    let (job, epoch) = peers.job();
    open(job, epoch, name, bytes).map_err(|why| {
        Error::rendezvous(format!(
            "the token of communicator {name:?} from {} cannot be used: {why}",
            peers.describe(0)
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_comes_through_whole_and_for_what_it_was_made_or_not_at_all() {
        let id = UniqueId::from_bytes([7; UniqueId::LEN]);
        let bytes = seal("job", 3, "tp", &id);
        assert_eq!(open("job", 3, "tp", &bytes), Ok(id));
        for (job, epoch, name, word) in [
            ("other", 3, "tp", "\"other\""),
            ("job", 4, "tp", "epoch 3"),
            ("job", 3, "ep", "\"tp\""),
        ] {
            let why = open(job, epoch, name, &bytes).unwrap_err();
            assert!(why.contains(word), "{word:?} in {why:?}");
        }
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            assert!(open("job", 3, "tp", &damaged).is_err(), "byte {at}");
            assert!(open("job", 3, "tp", &bytes[..at]).is_err());
        }
    }
}
