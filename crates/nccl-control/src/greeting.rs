//! How a rank and its coordinator make sure of each other before anything else is said.
//!
//! ```text
//! rank                                   coordinator
//!   hello: version, nonce, job, epoch,
//!          size, role, rank, host,
//!          pid, kernel             ───▶
//!                                  ◀───  challenge: nonce, proof of the secret
//!   proof of the secret            ───▶
//!                                  ◀───  welcome, by whom and to which epoch,
//!                                         or a refusal that says why, and perhaps
//!                                         where the one is that coordinates
//! ```
//!
//! A proof is an HMAC-SHA-256 over the side's name, the whole hello and the coordinator's nonce, with
//! the job's secret as the key. So neither side can be played back, nor played back to itself, and both
//! know that they mean the same rank of the same job. Without a secret the key is empty: it shows
//! mistakes, and keeps nobody out.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::frame::{Broken, Fields, Frame, Outgoing, put_bytes, put_index, put_number};
use super::secret::Secret;
use crate::visible;

pub(super) const MAGIC: [u8; 8] = *b"ncclmeet";
pub(super) const VERSION: u64 = 11;

pub(super) const NONCE: usize = 32;
type Proof = [u8; 32];

mod kind {
    pub(super) const HELLO: u8 = 1;
    pub(super) const CHALLENGE: u8 = 2;
    pub(super) const PROOF: u8 = 3;
    pub(super) const WELCOME: u8 = 4;
    pub(super) const REFUSED: u8 = 5;
}

/// What somebody wants to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Rank,
    /// No rank: it sees what becomes of them, and may say how their processes ended.
    Observer,
    /// An observer whose coordinator is gone: it wants the next one, and nobody else.
    Follower,
    /// One that has not been there before, and wants to observe: the epoch that it says, or the later one in
    /// which the world is by now.
    Onlooker,
    /// No rank yet: it asks to be one of the next epoch.
    Newcomer,
    /// No rank either: it asks this process for what its recorder has, and goes.
    Asker,
}

/// Who a rank says it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) nonce: [u8; NONCE],
    pub(super) has_secret: bool,
    pub(super) job: String,
    pub(super) epoch: u64,
    /// An observer that does not know says 0.
    pub(super) world_size: usize,
    pub(super) role: Role,
    pub(super) rank: usize,
    pub(super) host: String,
    pub(super) pid: u64,
    /// Where `pid` means something: the running kernel and the namespace of process numbers.
    pub(super) kernel: String,
}

/// The messages before two sides know each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Greeting {
    Hello(Hello),
    Challenge {
        nonce: [u8; NONCE],
        has_secret: bool,
        proof: Proof,
    },
    Proof(Proof),
    /// Of the rank that coordinates, or of the one whose door it is.
    Welcome {
        by: usize,
        epoch: u64,
    },
    Refused {
        why: String,
        again: Again,
    },
}

/// Whether another try may end better.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Again {
    Never,
    /// At another port.
    Elsewhere,
    /// When who answers is gone.
    Later,
    /// At that rank's door: it coordinates, as far as who answers knows.
    At {
        rank: usize,
        /// Empty where that is not known.
        at: String,
    },
}

/// Bytes that nobody can guess.
pub(super) fn nonce() -> std::io::Result<[u8; NONCE]> {
    let mut nonce = [0; NONCE];
    let mut filled = 0;
    while filled < NONCE {
        let flags = rustix::rand::GetRandomFlags::empty();
        match rustix::rand::getrandom(&mut nonce[filled..], flags) {
            Ok(count) => filled += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(nonce)
}

impl Greeting {
    pub(super) fn encode(&self) -> Outgoing {
        let mut to = Vec::new();
        let kind = match self {
            Self::Hello(hello) => {
                to.extend_from_slice(&MAGIC);
                put_number(&mut to, VERSION);
                to.extend_from_slice(&hello.nonce);
                put_number(&mut to, hello.has_secret.into());
                put_bytes(&mut to, hello.job.as_bytes());
                put_number(&mut to, hello.epoch);
                put_index(&mut to, hello.world_size);
                put_number(
                    &mut to,
                    match hello.role {
                        Role::Rank => 0,
                        Role::Observer => 1,
                        Role::Newcomer => 2,
                        Role::Asker => 3,
                        Role::Follower => 4,
                        Role::Onlooker => 5,
                    },
                );
                put_index(&mut to, hello.rank);
                put_bytes(&mut to, hello.host.as_bytes());
                put_number(&mut to, hello.pid);
                put_bytes(&mut to, hello.kernel.as_bytes());
                kind::HELLO
            }
            Self::Challenge {
                nonce,
                has_secret,
                proof,
            } => {
                to.extend_from_slice(nonce);
                put_number(&mut to, (*has_secret).into());
                to.extend_from_slice(proof);
                kind::CHALLENGE
            }
            Self::Proof(proof) => {
                to.extend_from_slice(proof);
                kind::PROOF
            }
            Self::Welcome { by, epoch } => {
                put_index(&mut to, *by);
                put_number(&mut to, *epoch);
                kind::WELCOME
            }
            Self::Refused { why, again } => {
                match again {
                    Again::Never => put_number(&mut to, 0),
                    Again::Elsewhere => put_number(&mut to, 1),
                    Again::Later => put_number(&mut to, 2),
                    Again::At { rank, at } => {
                        put_number(&mut to, 3);
                        put_index(&mut to, *rank);
                        put_bytes(&mut to, at.as_bytes());
                    }
                }
                put_bytes(&mut to, why.as_bytes());
                kind::REFUSED
            }
        };
        Outgoing::new(kind, 0, to.into())
    }

    pub(super) fn decode(frame: &Frame) -> Result<Self, Broken> {
        let mut fields = Fields(&frame.payload);
        let greeting = match frame.kind {
            kind::HELLO => {
                if fields.array()? != MAGIC {
                    return Err(Broken("a greeting of something else than a rank"));
                }
                if fields.number()? != VERSION {
                    return Err(OTHER_VERSION);
                }
                Self::Hello(Hello {
                    nonce: fields.array()?,
                    has_secret: fields.number()? != 0,
                    job: fields.text()?,
                    epoch: fields.number()?,
                    world_size: fields.index()?,
                    role: match fields.number()? {
                        0 => Role::Rank,
                        1 => Role::Observer,
                        2 => Role::Newcomer,
                        3 => Role::Asker,
                        4 => Role::Follower,
                        5 => Role::Onlooker,
                        _ => return Err(Broken("a greeting of an unknown role")),
                    },
                    rank: fields.index()?,
                    host: fields.text()?,
                    pid: fields.number()?,
                    kernel: fields.text()?,
                })
            }
            kind::CHALLENGE => Self::Challenge {
                nonce: fields.array()?,
                has_secret: fields.number()? != 0,
                proof: fields.array()?,
            },
            kind::PROOF => Self::Proof(fields.array()?),
            kind::WELCOME => Self::Welcome {
                by: fields.index()?,
                epoch: fields.number()?,
            },
            kind::REFUSED => Self::Refused {
                again: match fields.number()? {
                    0 => Again::Never,
                    1 => Again::Elsewhere,
                    2 => Again::Later,
                    3 => Again::At {
                        rank: fields.index()?,
                        at: fields.text()?,
                    },
                    _ => return Err(Broken("no kind of refusal")),
                },
                why: fields.said()?,
            },
            _ => return Err(Broken("something else than a greeting")),
        };
        fields.end()?;
        Ok(greeting)
    }
}

/// The other side was built from another release of this crate.
pub(super) const OTHER_VERSION: Broken =
    Broken("a greeting of another protocol version: all ranks need the same release of this crate");

/// Which side proves that it knows the secret.
#[derive(Clone, Copy, Debug)]
pub(super) enum Side {
    Coordinator,
    Rank,
}

fn mac(secret: Option<&Secret>, side: Side, hello: &Outgoing, nonce: &[u8; NONCE]) -> Hmac<Sha256> {
    let key = secret.map_or(&[][..], Secret::bytes);
    let mut mac = Hmac::<Sha256>::new_from_slice(key)
        .unwrap_or_else(|_| unreachable!("an HMAC takes a key of any length"));
    mac.update(match side {
        Side::Coordinator => b"coordinator",
        Side::Rank => b"rank",
    });
    mac.update(&(hello.payload.len() as u64).to_le_bytes());
    mac.update(&hello.payload);
    mac.update(nonce);
    mac
}

pub(super) fn prove(
    secret: Option<&Secret>,
    side: Side,
    hello: &Hello,
    nonce: &[u8; NONCE],
) -> Proof {
    let hello = Greeting::Hello(hello.clone()).encode();
    mac(secret, side, &hello, nonce)
        .finalize()
        .into_bytes()
        .into()
}

/// Whether the proof is right; takes the same time for all wrong ones.
pub(super) fn is_proved(
    secret: Option<&Secret>,
    side: Side,
    hello: &Hello,
    nonce: &[u8; NONCE],
    proof: &Proof,
) -> bool {
    let hello = Greeting::Hello(hello.clone()).encode();
    mac(secret, side, &hello, nonce).verify_slice(proof).is_ok()
}

impl Hello {
    /// Host, process and claim, for sentences.
    pub(super) fn claim(&self) -> String {
        let Self {
            host, pid, rank, ..
        } = self;
        // The proof is over what was sent.
        let host = visible::name(host);
        match self.role {
            Role::Rank => format!("{host}, pid {pid}, which says it is rank {rank}"),
            Role::Observer | Role::Follower | Role::Onlooker => {
                format!("{host}, pid {pid}, which wants to observe")
            }
            Role::Newcomer => format!("{host}, pid {pid}, which asks to come in"),
            Role::Asker => format!("{host}, pid {pid}, which asks for recordings"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello() -> Hello {
        Hello {
            nonce: [1; NONCE],
            has_secret: true,
            job: String::from("job"),
            epoch: 3,
            world_size: 4,
            role: Role::Rank,
            rank: 2,
            host: String::from("node"),
            pid: 77,
            kernel: String::from("k"),
        }
    }

    #[test]
    fn a_proof_holds_for_one_secret_one_side_one_hello_and_one_nonce() {
        let secret = Secret::new("a");
        let proof = prove(Some(&secret), Side::Rank, &hello(), &[7; NONCE]);
        let holds = |secret: Option<&Secret>, side, hello: &Hello, nonce| {
            is_proved(secret, side, hello, &[nonce; NONCE], &proof)
        };
        assert!(holds(Some(&secret), Side::Rank, &hello(), 7));
        assert!(!holds(Some(&Secret::new("b")), Side::Rank, &hello(), 7));
        assert!(!holds(None, Side::Rank, &hello(), 7));
        assert!(!holds(Some(&secret), Side::Coordinator, &hello(), 7));
        assert!(!holds(Some(&secret), Side::Rank, &hello(), 8));
        let other = Hello { rank: 3, ..hello() };
        assert!(!holds(Some(&secret), Side::Rank, &other, 7));
    }
}
