//! Ranks that share one device, as threads or as processes, and their memory.

use std::ffi::c_void;
use std::fmt;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaStream, result, sys};
use nccl::{Rendezvous, World};
use nccl_sys::{cudaStream_t, ncclUniqueId};

use super::{Result, wait_until};
use crate::perf;
use crate::spawn::{Job, Outcome, Output, threads};
use crate::{failure::Failure, nccl_call};

/// How ranks are arranged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Threads of one process.
    Threads,
    /// A process each.
    Processes,
}

impl Way {
    /// Parses the name.
    ///
    /// # Errors
    /// Lists the names.
    pub fn parse(name: &str) -> std::result::Result<Self, Failure> {
        match name {
            "threads" => Ok(Self::Threads),
            "processes" => Ok(Self::Processes),
            _ => Err(Failure::usage(format!(
                "`{name}`: ranks are threads or processes"
            ))),
        }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Threads => "threads",
            Self::Processes => "processes",
        })
    }
}

/// One rank.
#[derive(Debug)]
pub struct Rank {
    /// The world of the ranks.
    pub world: World,
    /// The device.
    pub context: Arc<CudaContext>,
    /// A stream of its own.
    pub stream: Arc<CudaStream>,
}

/// Device memory that is never freed.
#[derive(Clone, Copy, Debug)]
pub struct Memory {
    /// Its address.
    pub at: super::Address,
    /// Its size in bytes.
    pub len: usize,
}

impl Memory {
    /// Its address, for NCCL.
    #[must_use]
    pub fn pointer(self) -> *mut c_void {
        self.at.0
    }

    /// The memory behind the first `bytes`.
    ///
    /// # Panics
    /// When the memory is shorter.
    #[must_use]
    pub fn from(self, bytes: usize) -> Self {
        assert!(bytes <= self.len);
        Self {
            at: super::Address(self.at.0.wrapping_byte_add(bytes)),
            len: self.len - bytes,
        }
    }
}

impl Rank {
    /// The rank of `world`; ranks take the devices in turn.
    ///
    /// # Errors
    /// CUDA's.
    pub fn new(world: World) -> Result<Self> {
        let devices = CudaContext::device_count()?.max(1) as usize;
        let context = CudaContext::new(world.local_rank() % devices)?;
        let stream = context.new_stream()?;
        Ok(Self {
            world,
            context,
            stream,
        })
    }

    /// An id that rank 0 made, on all ranks.
    ///
    /// # Errors
    /// The world's, or NCCL's code.
    pub fn unique_id(&self, name: &str) -> Result<ncclUniqueId> {
        let mut id = ncclUniqueId::default();
        if self.world.rank() == 0 {
            let code = nccl_call!(ncclGetUniqueId(&mut id));
            if code != 0 {
                return Err(format!("ncclGetUniqueId returned {code}").into());
            }
        }
        let bytes: Vec<u8> = id.internal.iter().map(|&byte| byte as u8).collect();
        let all = self.world.all_gather(&format!("id/{name}"), &bytes)?;
        for (to, &from) in id.internal.iter_mut().zip(&all[0]) {
            *to = from as std::ffi::c_char;
        }
        Ok(id)
    }

    /// Waits for the other ranks.
    ///
    /// # Errors
    /// The world's.
    pub fn barrier(&self, name: &str) -> Result {
        Ok(self.world.barrier(name)?)
    }

    /// The stream, for NCCL.
    #[must_use]
    pub fn nccl_stream(&self) -> cudaStream_t {
        self.stream.cu_stream().cast()
    }

    /// Another stream of this rank, which is never destroyed.
    ///
    /// # Errors
    /// CUDA's.
    pub fn another_stream(&self) -> Result<Arc<CudaStream>> {
        let stream = self.context.new_stream()?;
        std::mem::forget(Arc::clone(&stream));
        Ok(stream)
    }

    /// Allocates device memory with these bytes.
    ///
    /// # Errors
    /// CUDA's.
    pub fn memory(&self, bytes: &[u8]) -> Result<Memory> {
        self.context.bind_to_thread()?;
        // SAFETY: the context is current; the allocation is never freed.
        let address = unsafe { result::malloc_sync(bytes.len().max(1)) }?;
        // SAFETY: as many bytes were just allocated.
        unsafe { result::memcpy_htod_sync(address, bytes) }?;
        Ok(Memory {
            at: super::Address(address as *mut c_void),
            len: bytes.len(),
        })
    }

    /// Reads the current contents.
    ///
    /// # Errors
    /// CUDA's.
    pub fn read(&self, memory: Memory) -> Result<Vec<u8>> {
        self.context.bind_to_thread()?;
        let mut bytes = vec![0u8; memory.len];
        let address = memory.pointer() as sys::CUdeviceptr;
        // SAFETY: the memory is that long and never freed.
        unsafe { result::memcpy_dtoh_sync(&mut bytes, address) }?;
        Ok(bytes)
    }

    /// Whether the stream completes within `timeout`; the driver's error if it has one.
    pub fn ends_within(&self, timeout: Duration) -> std::result::Result<bool, String> {
        stream_ends_within(&self.stream, timeout)
    }
}

/// As [`Rank::ends_within`], for any stream.
pub fn stream_ends_within(
    stream: &Arc<CudaStream>,
    timeout: Duration,
) -> std::result::Result<bool, String> {
    let mut answer = sys::CUresult::CUDA_ERROR_NOT_READY;
    wait_until(timeout, || {
        // SAFETY: the stream is alive.
        answer = unsafe { sys::cuStreamQuery(stream.cu_stream()) };
        answer != sys::CUresult::CUDA_ERROR_NOT_READY
    });
    match answer {
        sys::CUresult::CUDA_SUCCESS => Ok(true),
        sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        error => Err(format!("{error:?}")),
    }
}

/// Marks a process as a rank of [`run`].
const MARK: &str = "NCCL_TOOLS_RAW_RANK";

/// When set, gives every process of [`run`] a host of its own, as NCCL sees it.
pub const HOSTS: &str = "NCCL_TOOLS_HOSTS";

/// Runs `body` once per rank; with processes, this program is started again for each, with the same arguments. The
/// ranks' standard output is printed on that of this process at the end. Does not return in a process that is a rank.
///
/// # Errors
/// The failure of a rank, as a [`RankFailure`](crate::spawn::RankFailure) where it is a process, or that not all ended
/// in time.
pub fn run(
    way: Way,
    ranks: usize,
    deadline: Duration,
    body: impl Fn(&Rank) -> Result + Send + Sync + 'static,
) -> Result {
    let one = move |world: World| {
        let rank = Rank::new(world).map_err(|error| error.to_string())?;
        let result = body(&rank).map_err(|error| error.to_string());
        let Rank {
            world,
            context,
            stream,
        } = rank;
        // Destroying the stream would wait for operations that are still enqueued.
        std::mem::forget((context, stream));
        // Leaves the world in order: other ranks may still wait for this rank's last message.
        drop(world);
        result
    };
    if std::env::var_os(MARK).is_some() {
        perf::install(1)?;
        let result = Rendezvous::from_env()
            .map_err(|error| error.to_string())
            .and_then(|rendezvous| World::join(rendezvous).map_err(|error| format!("{error:#}")))
            .and_then(one);
        if let Err(error) = &result {
            eprintln!("{error}");
        }
        leave(i32::from(result.is_err()));
    }
    match way {
        Way::Threads => {
            perf::install(1)?;
            let ended = threads::run(World::threads(ranks), Some(deadline), move |_, world| {
                one(world)
            });
            ended.map_err(|failure| failure.to_string().into())
        }
        Way::Processes => {
            let program = std::env::current_exe()?;
            let job = Job::new(ranks).output(Output::Collect).deadline(deadline);
            let hosts = std::env::var_os(HOSTS).is_some();
            let ended = job.run(|rank| {
                let mut command = Command::new(&program);
                command.args(std::env::args_os().skip(1)).env(MARK, "1");
                if hosts {
                    command.env("NCCL_HOSTID", format!("host-{rank}"));
                }
                command
            })?;
            for rank in &ended.ranks {
                for line in &rank.stdout {
                    println!("{line}");
                }
                for line in &rank.stderr {
                    eprintln!("[rank {}] {line}", rank.rank);
                }
            }
            match ended.outcome {
                Outcome::Succeeded => Ok(()),
                Outcome::Failed(failure) => Err((*failure).into()),
                Outcome::TimedOut(states) => Err(format!("the deadline passed:\n{states}").into()),
                Outcome::OutputClosed => Err("the output is closed".into()),
            }
        }
    }
}

/// Ends the process at once, without waiting for operations that hang.
pub fn leave(code: i32) -> ! {
    use std::io::Write;
    let _ = std::io::stdout().flush();
    // SAFETY: only ends the process.
    unsafe { libc::_exit(code) }
}
