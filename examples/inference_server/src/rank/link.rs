//! A rank's connection to the front.

use std::io::{self, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::sync::mpsc::{self, Receiver, Sender};

use nccl::World;
use nccl::control::WorldEvent;

use crate::wire::{self, FromRank, ToRank};

/// A message to a waiting rank.
pub(super) enum Told {
    /// A message of the front.
    Front(ToRank),
    /// An event of the world: a rank may be gone.
    World,
}

/// The connection to the front. A thread reads it, and ends the process when the connection ends: without a front
/// there are no requests.
pub(super) struct Link {
    stream: UnixStream,
    inbox: Receiver<Told>,
    told: Sender<Told>,
}

impl Link {
    pub(super) fn connect(name: &str, place: usize) -> io::Result<Self> {
        let address = SocketAddr::from_abstract_name(name)?;
        let mut stream = UnixStream::connect_addr(&address)?;
        wire::write(&mut stream, &FromRank::Hello { place })?;
        let (told, inbox) = mpsc::channel();
        let (mut reading, telling) = (stream.try_clone()?, told.clone());
        std::thread::Builder::new()
            .name(String::from("front"))
            .spawn(move || {
                while let Ok(Some(message)) = wire::read(&mut reading) {
                    if telling.send(Told::Front(message)).is_err() {
                        return;
                    }
                }
                // Ends the process, whatever its other threads do. The front also read this process's stderr, so
                // the write may fail.
                let _ = writeln!(io::stderr(), "the front is gone");
                std::process::exit(1);
            })?;
        Ok(Self {
            stream,
            inbox,
            told,
        })
    }

    /// Wakes this rank at every event that may end the generation, in this generation of the world and all later ones.
    pub(super) fn listen_to(&self, world: &World) -> io::Result<()> {
        let (events, told) = (world.events(), self.told.clone());
        let thread = std::thread::Builder::new().name(String::from("world"));
        let listen = move || {
            for event in events {
                let harm = matches!(
                    event,
                    WorldEvent::Gone { .. }
                        | WorldEvent::Failed { .. }
                        | WorldEvent::Left { .. }
                        | WorldEvent::Fault { .. }
                        | WorldEvent::Missed { .. }
                );
                if harm && told.send(Told::World).is_err() {
                    return;
                }
            }
        };
        thread.spawn(listen).map(drop)
    }

    pub(super) fn say(&mut self, message: &FromRank) -> io::Result<()> {
        wire::write(&mut self.stream, message)
    }

    /// Waits for the next message.
    pub(super) fn hear(&self) -> Told {
        // Cannot fail: `self.told` keeps the channel open.
        self.inbox.recv().unwrap_or(Told::World)
    }
}
