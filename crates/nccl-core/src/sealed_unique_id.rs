//! NCCL's token, sealed for the transfer from the rank that made it to the others.
//!
//! With a damaged token, or one of another job or attempt, NCCL would try to connect for a minute. The seal contains
//! the job, the generation and the communicator that the token is for, and ends with a checksum.

use nccl_base::wire::{self, bytes, checksum};
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::peers::Peers;
use crate::unique_id::UniqueId;

const MAGIC: [u8; 8] = *b"ncclid.2";

#[derive(Serialize, Deserialize)]
struct SealedUniqueId {
    job: String,
    generation: u64,
    name: String,
    #[serde(with = "bytes")]
    id: Vec<u8>,
}

/// Seals the token of communicator `name` in a generation of a job.
pub(crate) fn seal(job: &str, generation: u64, name: &str, id: &UniqueId) -> Vec<u8> {
    let envelope = wire::encode(&SealedUniqueId {
        job: job.to_owned(),
        generation,
        name: name.to_owned(),
        id: id.as_bytes().to_vec(),
    });
    let mut bytes = [&MAGIC[..], &envelope].concat();
    bytes.extend(checksum(&bytes).to_le_bytes());
    bytes
}

/// Opens the token that [`seal`] sealed for the same job, generation and name.
pub(crate) fn open(
    job: &str,
    generation: u64,
    name: &str,
    bytes: &[u8],
) -> Result<UniqueId, String> {
    let envelope = || {
        let (sealed, sum) = bytes.split_last_chunk()?;
        let whole = checksum(sealed) == u64::from_le_bytes(*sum);
        let envelope = sealed.strip_prefix(&MAGIC).filter(|_| whole)?;
        wire::decode::<SealedUniqueId>(envelope).ok()
    };
    let damaged = || format!("it is damaged ({} bytes)", bytes.len());
    let found = envelope().ok_or_else(damaged)?;
    if (&found.job[..], found.generation, &found.name[..]) != (job, generation, name) {
        return Err(format!(
            "it is for {:?} of job {:?}, generation {}, and this is {name:?} of job {job:?}, generation {generation}",
            found.name, found.job, found.generation
        ));
    }
    let id = found.id.try_into().map_err(|_| damaged())?;
    Ok(UniqueId::from_bytes(id))
}

/// Seals the token of communicator `name`, to send to the other ranks of `peers`.
pub(crate) fn seal_for(peers: &dyn Peers, name: &str, id: &UniqueId) -> Vec<u8> {
    let (job, generation) = peers.job();
    seal(job, generation, name, id)
}

/// Opens the token of communicator `name`, of the job and generation of `peers`.
pub(crate) fn open_from(peers: &dyn Peers, name: &str, bytes: &[u8]) -> Result<UniqueId> {
    let (job, generation) = peers.job();
    open(job, generation, name, bytes).map_err(|why| {
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
        for (job, generation, name, word) in [
            ("other", 3, "tp", "\"other\""),
            ("job", 4, "tp", "generation 3"),
            ("job", 3, "ep", "\"tp\""),
        ] {
            let why = open(job, generation, name, &bytes).unwrap_err();
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
