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
    /// Take a step. All ranks that serve in the generation get the same.
    Step(Step),
    /// Show that all ranks that serve in the generation can do something together.
    Probe {
        /// The generation for which it is meant; in any other it is nothing.
        generation: u64,
        /// Its number, of all steps and probes of the server.
        number: u64,
    },
    /// Go on to the next generation: another rank can do no more in this one. A rank that has no part of the model would not hear of
    /// what ended the model's communicator, and the others would wait for it.
    GoOn {
        /// The generation that is over.
        generation: u64,
    },
    /// Send and receive the next part of the experts that other ranks are to have.
    MoveExperts {
        /// The generation for which it is meant.
        generation: u64,
        /// Its number, of all steps and probes of the server.
        number: u64,
    },
    /// Put the experts where they are to be: all parts have arrived.
    PlaceExperts {
        /// The generation for which it is meant.
        generation: u64,
        /// Its number, of all steps and probes of the server.
        number: u64,
    },
    /// Plan other places for the experts, by how often each was chosen.
    Balance {
        /// The generation for which it is meant.
        generation: u64,
        /// Its number, of all steps and probes of the server.
        number: u64,
    },
    /// Say goodbye to the others, which go on, and end.
    Leave,
    /// Say goodbye to the others, which end as well, and end.
    End,
}

/// One step of all ranks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Step {
    /// The generation for which it was planned; in any other it is nothing.
    pub generation: u64,
    /// Its number, of all steps and probes of the server.
    pub number: u64,
    /// Its rows.
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
    /// How the token after it is drawn, if it is wanted.
    pub draw: Option<Draw>,
}

impl StepRow {
    /// What the model is given.
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

/// How many copies of each expert there are, at least.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Copies {
    /// Now.
    pub now: usize,
    /// After [`ToRank::PlaceExperts`].
    pub planned: usize,
    /// After so many rounds of [`ToRank::MoveExperts`]; `None` when the experts are where they are to be.
    pub rounds: Option<usize>,
}

/// From a rank to the front.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum FromRank {
    /// The first message of a process.
    Hello {
        /// Which of the launcher's ranks it is: it keeps that number, whatever number it has in a generation.
        place: usize,
    },
    /// It is in the world of this generation.
    Entered {
        /// The generation's number.
        generation: u64,
    },
    /// It has its part of the model and a communicator, and takes steps of this generation.
    Serves {
        /// The generation's number.
        generation: u64,
        /// Its number in the world.
        rank: usize,
        /// Which part of the model it has; a rank without one is there for when another dies.
        shard: Option<usize>,
        /// How many parts there are.
        shards: usize,
        /// The number of its CUDA device, as it sees them; ranks share one where there are not enough.
        device: usize,
        /// The copies of its experts, where experts have copies.
        copies: Option<Copies>,
        /// How many positions of each slot are still in a cache; of slots that are not named, none are.
        kept: Vec<usize>,
    },
    /// A round of [`ToRank::MoveExperts`] is over on this rank.
    Moved {
        /// The generation's number.
        generation: u64,
        /// The round's number.
        number: u64,
    },
    /// The experts of this rank are where they were to be.
    Placed {
        /// The generation's number.
        generation: u64,
        /// The number of what asked for it.
        number: u64,
        /// How many copies of each expert there are, at least.
        copies: usize,
    },
    /// Other places are planned ([`ToRank::Balance`]). The rank that has the first part says so.
    Balanced {
        /// The generation's number.
        generation: u64,
        /// The plan's number.
        number: u64,
        /// What is to move.
        copies: Copies,
        /// What the busiest rank has to do, over the mean of all, by how often the experts were chosen: now and after that.
        imbalance: [f64; 2],
    },
    /// The tokens of a step, for the rows that wanted one. The rank that has the first part says them.
    Drawn {
        /// The step's generation.
        generation: u64,
        /// The step's number.
        number: u64,
        /// One for each row that wanted one, in their order.
        tokens: Vec<u32>,
        /// How long the step took on this rank, in seconds.
        seconds: f64,
        /// How much of that was communication, with the wait for the other ranks.
        communicating: f64,
    },
    /// A probe is over. The rank that has the first part says so.
    Probed {
        /// The probe's generation.
        generation: u64,
        /// The probe's number.
        number: u64,
    },
    /// This rank goes on to the next generation, since another one is gone.
    Left {
        /// The number of the generation that it leaves.
        generation: u64,
        /// What ended the communicator on all ranks.
        fault: Option<Box<Fault>>,
    },
    /// This rank can do no more in this generation, and goes on to the next.
    Failed {
        /// The generation's number.
        generation: u64,
        /// Its error.
        error: String,
        /// What ended the communicator on all ranks, if that was it.
        fault: Option<Box<Fault>>,
    },
}

/// Writes one message.
///
/// # Errors
/// Of the connection.
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
/// Of the connection, and for what is no message.
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
