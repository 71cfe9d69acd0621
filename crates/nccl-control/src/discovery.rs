//! Where the processes of a job find their coordinator, and which half of a partitioned job continues.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::atomic_file;

/// Where the processes of a job find their coordinator over TCP, and which half of the job continues when a network
/// partition splits it in two.
///
/// All processes of a job use the same discovery: a file on a shared file system
/// ([`Rendezvous::publish`](crate::Rendezvous::publish)), or a cluster service such as etcd or the Kubernetes API
/// server, for which a program implements this trait. Each function may block for at most a second; it is called on a
/// thread of its own, or while a process looks for the others.
///
/// ```
/// use std::collections::HashMap;
/// use std::io;
/// use std::net::SocketAddr;
/// use std::sync::{Arc, Mutex};
///
/// use nccl::control::Discovery;
/// use nccl::Rendezvous;
///
/// /// A service that all ranks reach; here, ranks that are threads.
/// #[derive(Default)]
/// struct Service {
///     at: Mutex<Option<SocketAddr>>,
///     claims: Mutex<HashMap<String, String>>,
/// }
///
/// impl Discovery for Service {
///     fn name(&self) -> String {
///         String::from("the service")
///     }
///
///     fn publish(&self, at: SocketAddr) -> io::Result<()> {
///         *self.at.lock().unwrap() = Some(at);
///         Ok(())
///     }
///
///     fn withdraw(&self, at: SocketAddr) {
///         self.at.lock().unwrap().take_if(|known| *known == at);
///     }
///
///     fn find(&self) -> io::Result<SocketAddr> {
///         self.at.lock().unwrap().ok_or_else(|| io::ErrorKind::NotFound.into())
///     }
///
///     fn claim(&self, generation: &str, claimant: &str) -> io::Result<bool> {
///         let mut claims = self.claims.lock().unwrap();
///         Ok(claims.entry(generation.to_owned()).or_insert(claimant.to_owned()) == claimant)
///     }
/// }
///
/// let service = Arc::new(Service::default());
/// let rendezvous = Rendezvous::tcp("10.0.0.5", 0, 3, 16)?.discovery(service);
/// # Ok::<(), nccl::Error>(())
/// ```
pub trait Discovery: Send + Sync + UnwindSafe + RefUnwindSafe {
    /// Returns the name used in errors, for example the path of a file. Discoveries with the same name are equal.
    fn name(&self) -> String;

    /// Publishes where the coordinator listens, in place of an earlier address.
    ///
    /// # Errors
    /// The address cannot be published. At the start, rank 0's join ends with that error.
    fn publish(&self, at: SocketAddr) -> io::Result<()>;

    /// Withdraws the published address, unless another address has replaced it.
    fn withdraw(&self, at: SocketAddr);

    /// Returns where the coordinator listens.
    ///
    /// # Errors
    /// When the address is not known yet: `find` is called again until the rendezvous timeout.
    fn find(&self) -> io::Result<SocketAddr>;

    /// Whether `claimant` is the first to claim the successor of `generation`: a compare-and-set whose result is kept
    /// forever. The first claimant gets `true` on every call. A claimant is a voter; any rank may call this on its
    /// behalf, concurrently with other ranks, and all get the same answer. Both names consist of letters, digits and
    /// dashes, and are unique to the job and the generation.
    ///
    /// When exactly half of the voters reach each other, the side that gets `true` for one of its voters continues, and
    /// the other side does not. Without an implementation of this function, neither side continues until an operator
    /// decides.
    ///
    /// # Errors
    /// When the result is not known: the claimant then does not continue.
    fn claim(&self, generation: &str, claimant: &str) -> io::Result<bool> {
        let _ = (generation, claimant);
        Err(io::ErrorKind::Unsupported.into())
    }
}

/// A [`Discovery`] that stores the coordinator's address in a file, on a file system that all hosts share.
///
/// Claims are files beside it, with `.claim-` after its name; they are small and are never deleted. The file system
/// must support hard links.
#[derive(Clone, Debug)]
pub(crate) struct FileDiscovery {
    path: PathBuf,
}

impl FileDiscovery {
    /// Uses the file at `path`, which need not exist yet.
    pub(crate) fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    fn beside(&self, what: &str) -> PathBuf {
        let mut path = self.path.clone().into_os_string();
        path.push(what);
        path.into()
    }
}

impl Discovery for FileDiscovery {
    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn publish(&self, at: SocketAddr) -> io::Result<()> {
        // Written atomically, so that no process reads half an address.
        atomic_file::write(&self.path, format!("{at}\n").as_bytes())
    }

    fn withdraw(&self, at: SocketAddr) {
        let at = at.to_string();
        let _ = atomic_file::remove_if(&self.path, |content| content.trim_ascii() == at.as_bytes());
    }

    fn find(&self) -> io::Result<SocketAddr> {
        let named = |error: io::Error| {
            let text = format!("{}: {error}", self.path.display());
            io::Error::new(error.kind(), text)
        };
        let text = read(&self.path).map_err(named)?;
        text.parse()
            .map_err(|_| io::Error::other(format!("{} holds no address", self.path.display())))
    }

    fn claim(&self, generation: &str, claimant: &str) -> io::Result<bool> {
        let claim = self.beside(&format!(".claim-{generation}"));
        match atomic_file::write_new(&claim, claimant.as_bytes()) {
            Ok(()) => Ok(true),
            // Another process has created the file on behalf of the same claimant, or this process has and the reply
            // was lost.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Ok(read(&claim)? == claimant)
            }
            Err(error) => Err(error),
        }
    }
}

fn read(path: &Path) -> io::Result<String> {
    Ok(std::fs::read_to_string(path)?.trim().to_owned())
}

/// A handle to the discovery of a rendezvous.
#[derive(Clone)]
pub(super) struct DiscoveryHandle(pub(super) Arc<dyn Discovery>);

impl fmt::Debug for DiscoveryHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Discovery").field(&self.0.name()).finish()
    }
}

impl PartialEq for DiscoveryHandle {
    fn eq(&self, other: &Self) -> bool {
        self.0.name() == other.0.name()
    }
}

impl Eq for DiscoveryHandle {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_of_many_that_claim_at_once_is_the_first_whenever_it_asks() {
        let name = format!("nccl-claims-{}", std::process::id());
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&folder).unwrap();
        let discovery = FileDiscovery::new(folder.join("address"));
        for generation in ["0-1", "1-1"] {
            let ask = || {
                std::thread::scope(|scope| {
                    let threads: Vec<_> = (0..8)
                        .map(|own| {
                            let discovery = &discovery;
                            let name = own.to_string();
                            scope.spawn(move || discovery.claim(generation, &name).unwrap())
                        })
                        .collect();
                    let won = threads.into_iter().map(|thread| thread.join().unwrap());
                    won.collect::<Vec<_>>()
                })
            };
            let first = ask();
            assert_eq!(first.iter().filter(|won| **won).count(), 1, "{first:?}");
            assert_eq!(ask(), first);
        }
        let left: Vec<_> = std::fs::read_dir(&folder).unwrap().collect();
        assert_eq!(left.len(), 2, "{left:?}");
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn an_address_that_is_withdrawn_late_leaves_that_of_the_next_coordinator() {
        let folder = tempfile::tempdir().unwrap();
        let discovery = FileDiscovery::new(folder.path().join("address"));
        let [previous, next] = [1, 2].map(|port| SocketAddr::from(([127, 0, 0, 1], port)));
        for _ in 0..2000 {
            discovery.publish(previous).unwrap();
            let begin = std::sync::Barrier::new(2);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    begin.wait();
                    discovery.withdraw(previous);
                });
                begin.wait();
                discovery.publish(next).unwrap();
            });
            assert_eq!(discovery.find().unwrap(), next);
        }
        discovery.withdraw(previous);
        assert_eq!(discovery.find().unwrap(), next);
        discovery.withdraw(next);
        discovery.find().unwrap_err();
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn where_no_claim_can_be_made_nobody_is_first() {
        let nowhere = FileDiscovery::new("/proc/nowhere/address");
        nowhere.claim("0-1", "a").unwrap_err();
    }
}
