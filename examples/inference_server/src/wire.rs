//! The protocol between the front and the ranks: frames of JSON over one connection for each rank.
//!
//! The front sends the same [`Step`]s to all ranks that serve, in the same order, and has one connection to each. The crate
//! offers an ordered broadcast for that ([`nccl::World::channel`]), from one rank to the others. But then the front would
//! have to talk to that rank, choose another one when it dies, and lose messages in flight. With a connection for each, no
//! rank is special to the front, a killed rank 0 is like any other, and all ranks see the end of the front.
//!
//! The socket is a Unix socket without a file (an abstract name, random for each server), so that it vanishes with the
//! front. The kernel tells the user of each connection, and only the same user is accepted. A message begins with its
//! length (4 bytes, little endian).

use std::io::{self, Read, Write};

use nccl::fault::Fault;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::model::{Row, Sampling};

/// The longest valid frame, far above any message: a longer one comes from another program.
const LONGEST: usize = 1 << 20;

/// From the front to a rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToRank {
    /// Take a step. All ranks that serve in the generation get the same step.
    Step(Step),
    /// Complete a small operation with all other ranks that serve in the generation, to show that they work.
    Probe {
        /// The generation of the probe; the rank ignores it in any other generation.
        generation: u64,
        /// The number of the probe; all steps and probes of the server are numbered together.
        number: u64,
    },
    /// Move on to the next generation: another rank has failed in this one. A rank without a part of the model does not learn
    /// of the fault that ended the model's communicator, and the others would wait for it.
    GoOn {
        /// The generation that is over.
        generation: u64,
    },
    /// Send and receive the next part of the experts that move between ranks.
    MoveExperts {
        /// The generation of the round.
        generation: u64,
        /// The number of the round; all steps and probes of the server are numbered together.
        number: u64,
    },
    /// Put the moved experts in their new places: all parts have arrived.
    PlaceExperts {
        /// The generation of the request.
        generation: u64,
        /// The number of the request; all steps and probes of the server are numbered together.
        number: u64,
    },
    /// Plan new places for the experts, by how often each was chosen.
    Balance {
        /// The generation of the request.
        generation: u64,
        /// The number of the request; all steps and probes of the server are numbered together.
        number: u64,
    },
    /// Leave the other ranks, which continue, and end the process.
    Leave,
    /// Finalize together with the other ranks, which end as well, and end the process.
    End,
}

/// One step of all ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// The generation for which the step was planned; a rank ignores it in any other.
    pub generation: u64,
    /// The number of the step; all steps and probes of the server are numbered together.
    pub number: u64,
    /// The rows of the step.
    pub rows: Vec<StepRow>,
}

/// One token of one request.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepRow {
    /// As [`Row::slot`].
    pub slot: usize,
    /// As [`Row::position`].
    pub position: usize,
    /// As [`Row::token`].
    pub token: u32,
    /// How to draw the next token, if it is wanted.
    pub draw: Option<Draw>,
}

impl StepRow {
    /// Returns the row without the sampling.
    #[must_use]
    pub fn row(&self) -> Row {
        Row {
            slot: self.slot,
            position: self.position,
            token: self.token,
            logits: self.draw.is_some(),
        }
    }
}

/// As [`Sampling`].
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Draw {
    /// As [`Sampling::temperature`].
    pub temperature: f32,
    /// As [`Sampling::top_p`].
    pub top_p: f32,
    /// As [`Sampling::seed`].
    pub seed: u64,
}

impl From<Draw> for Sampling {
    fn from(draw: Draw) -> Self {
        Self {
            temperature: draw.temperature,
            top_k: 0,
            top_p: draw.top_p,
            seed: draw.seed,
        }
    }
}

/// The fewest copies that any expert has, now and after the moves in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Copies {
    /// Now.
    pub now: usize,
    /// After [`ToRank::PlaceExperts`].
    pub planned: usize,
    /// The number of rounds of [`ToRank::MoveExperts`] until then; `None` when no experts have to move.
    pub rounds: Option<usize>,
}

/// From a rank to the front.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum FromRank {
    /// The first message of a process.
    Hello {
        /// The launcher's number of the rank. It does not change, unlike the rank's number in a generation.
        place: usize,
    },
    /// The rank has entered the world of this generation.
    Entered {
        /// The generation's number.
        generation: u64,
    },
    /// The rank has its part of the model and a communicator, and takes steps of this generation.
    Serves {
        /// The generation's number.
        generation: u64,
        /// The rank's number in the world.
        rank: usize,
        /// The rank's part of the model; a rank without a part is a spare for when another dies.
        shard: Option<usize>,
        /// The number of parts.
        shards: usize,
        /// The number of the rank's CUDA device, as the rank sees it; ranks share a device if there are too few.
        device: usize,
        /// The copies of the experts, if experts have copies.
        copies: Option<Copies>,
        /// How many positions of each slot are still in a cache. Slots that are not listed have none.
        kept: Vec<usize>,
    },
    /// A round of [`ToRank::MoveExperts`] is over on this rank.
    Moved {
        /// The generation's number.
        generation: u64,
        /// The round's number.
        number: u64,
    },
    /// The experts of this rank are in their new places.
    Placed {
        /// The generation's number.
        generation: u64,
        /// The number of the request.
        number: u64,
        /// The fewest copies that any expert has.
        copies: usize,
    },
    /// New places are planned ([`ToRank::Balance`]). Sent by the rank with the first part.
    Balanced {
        /// The generation's number.
        generation: u64,
        /// The number of the request.
        number: u64,
        /// The copies before and after the planned moves.
        copies: Copies,
        /// The load of the busiest rank over the mean of all ranks, by how often the experts were chosen: now, and after the
        /// moves.
        imbalance: [f64; 2],
    },
    /// The drawn tokens of a step. Sent by the rank with the first part.
    Drawn {
        /// The step's generation.
        generation: u64,
        /// The step's number.
        number: u64,
        /// One for each row with a [`StepRow::draw`], in the order of the rows.
        tokens: Vec<u32>,
        /// How long the step took on this rank, in seconds.
        seconds: f64,
        /// How much of that was communication, including the wait for the other ranks.
        communicating: f64,
    },
    /// A probe is over. Sent by the rank with the first part.
    Probed {
        /// The probe's generation.
        generation: u64,
        /// The probe's number.
        number: u64,
    },
    /// This rank moves on to the next generation, since another rank is gone.
    Left {
        /// The number of the generation that the rank leaves.
        generation: u64,
        /// The fault that ended the communicator on all ranks, if known.
        fault: Option<Box<Fault>>,
    },
    /// This rank cannot continue in this generation, and moves on to the next.
    Failed {
        /// The generation's number.
        generation: u64,
        /// The rank's error.
        error: String,
        /// The fault that ended the communicator on all ranks, if that is the cause.
        fault: Option<Box<Fault>>,
    },
}

/// Writes one message.
///
/// # Errors
/// Those of the connection.
pub fn write(to: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    let mut frame = vec![0; 4];
    serde_json::to_writer(&mut frame, message)?;
    let length = frame.len() - 4;
    if length > LONGEST {
        return Err(too_long(length));
    }
    frame[..4].copy_from_slice(&(length as u32).to_le_bytes());
    to.write_all(&frame)
}

/// Reads one message; `None` when the other side has closed the connection.
///
/// # Errors
/// Those of the connection, and for an invalid message.
pub fn read<T: DeserializeOwned>(from: &mut impl Read) -> io::Result<Option<T>> {
    let mut length = [0; 4];
    match from.read_exact(&mut length) {
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        Err(error) => return Err(error),
    }
    let length = u32::from_le_bytes(length) as usize;
    if length > LONGEST {
        return Err(too_long(length));
    }
    let mut frame = vec![0; length];
    from.read_exact(&mut frame)?;
    Ok(Some(serde_json::from_slice(&frame)?))
}

fn too_long(length: usize) -> io::Error {
    let text = format!("a message of {length} bytes; {LONGEST} are possible");
    io::Error::new(io::ErrorKind::InvalidData, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_what_is_read_and_then_the_end() {
        let draw = Draw {
            temperature: 0.7,
            top_p: 0.95,
            seed: u64::MAX,
        };
        let row = StepRow {
            slot: 3,
            position: 1023,
            token: 255,
            draw: Some(draw),
        };
        let step = ToRank::Step(Step {
            generation: 2,
            number: 7,
            rows: vec![row; 40],
        });
        let mut bytes = Vec::new();
        write(&mut bytes, &step).unwrap();
        write(&mut bytes, &ToRank::End).unwrap();
        let mut bytes = &bytes[..];
        assert_eq!(read(&mut bytes).unwrap(), Some(step));
        assert_eq!(read(&mut bytes).unwrap(), Some(ToRank::End));
        assert_eq!(read::<ToRank>(&mut bytes).unwrap(), None);
    }

    #[test]
    fn what_is_no_message_is_refused() {
        let long = [0xff, 0xff, 0xff, 0x7f];
        assert!(read::<ToRank>(&mut &long[..]).is_err());
        let cut = [9, 0, 0, 0, b'"'];
        assert!(read::<ToRank>(&mut &cut[..]).is_err());
        let other = [3, 0, 0, 0, b'"', b'x', b'"'];
        assert!(read::<ToRank>(&mut &other[..]).is_err());
    }
}
