//! Ranks for tests, through the raw C ABI: as threads of a process of the test's own, or as
//! processes.
//!
//! Faults, violations, settings and the log belong to a whole process, and a test that hangs must
//! not block others. So every test here runs in a child process: this executable again, with
//! the test's name ([`alone`]). Every child has a deadline.

// Each test file uses its own part of this.
#![allow(dead_code)]

pub(crate) mod cases;
pub(crate) mod children;

use std::ffi::c_void;
use std::fs;
use std::marker::PhantomData;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::{CudaContext, CudaStream, result};
use nccl_sys::{
    Api, NCCL_CONFIG_INITIALIZER, ncclComm_t, ncclDataType_t, ncclRedOp_t, ncclResult_t,
    ncclUniqueId,
};

/// How long a child may take.
const DEADLINE: Duration = Duration::from_secs(60);
const ROLE: &str = "NCCL_EMULATOR_TEST_ROLE";
const PLACE: &str = "NCCL_EMULATOR_TEST_PLACE";

/// The functions of the emulator, found as a program finds NCCL's.
pub(crate) fn api() -> &'static Api {
    static API: OnceLock<Api> = OnceLock::new();
    API.get_or_init(|| {
        nccl_emulator::install().unwrap();
        // SAFETY: NCCL's name now leads to the emulator.
        unsafe { nccl_sys::Loader::new().load() }.unwrap().api
    })
}

/// Calls a function of NCCL by name and returns its code.
macro_rules! nccl {
    ($function:ident($($argument:expr),* $(,)?)) => {{
        let function = $crate::ranks::api().$function().unwrap();
        // SAFETY: the test keeps the function's contract, or breaks it in a way that the emulator detects.
        unsafe { function($($argument),*) }.0
    }};
}

pub(crate) use nccl;

/// The text of the last error.
pub(crate) fn last_error() -> String {
    let function = api().ncclGetLastError().unwrap();
    // SAFETY: the text is a C string for the life of the process.
    unsafe { std::ffi::CStr::from_ptr(function(std::ptr::null_mut())) }
        .to_string_lossy()
        .into_owned()
}

/// Waits until `condition` holds.
pub(crate) fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(
            start.elapsed() < DEADLINE / 2,
            "waited in vain until {what}"
        );
        thread::sleep(Duration::from_micros(200));
    }
}

/// Whether this process is a child of the test.
pub(crate) fn is_child_of(test: &str) -> bool {
    role(test).is_some()
}

/// The role of this process, if it is a child of the test.
fn role(test: &str) -> Option<String> {
    let role = std::env::var(ROLE).ok()?;
    let (name, role) = role.rsplit_once('/')?;
    (name == test).then(|| role.to_owned())
}

/// The placeholder in a variable's value for the directory of the test's processes.
const PLACE_OF_TEST: &str = "{place}";
/// The placeholder in a variable's value for the rank of a process.
const RANK_OF_PROCESS: &str = "{rank}";

fn child(test: &str, role: &str, place: &PathBuf, environment: &[(&str, &str)]) -> Command {
    let directory = place.to_str().unwrap();
    let value = |value: &str| {
        let value = value.replace(PLACE_OF_TEST, directory);
        value.replace(RANK_OF_PROCESS, role)
    };
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args([test, "--exact", "--nocapture", "--test-threads=1"])
        .env(ROLE, format!("{test}/{role}"))
        .env(PLACE, place)
        .envs(environment.iter().map(|(name, text)| (name, value(text))))
        .stdin(Stdio::null());
    command
}

/// Starts a command on this host.
fn spawn(mut command: Command) -> Child {
    command.spawn().unwrap()
}

fn new_place() -> PathBuf {
    static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let number = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let place = std::env::temp_dir().join(format!("nccl-emulator-{}-{number}", std::process::id()));
    fs::create_dir_all(&place).unwrap();
    place
}

/// Waits for children, and kills those that have not ended after [`DEADLINE`].
fn join(mut children: Vec<Child>) -> Vec<Option<ExitStatus>> {
    let start = Instant::now();
    let mut status = vec![None; children.len()];
    while status.iter().any(Option::is_none) && start.elapsed() < DEADLINE {
        for (child, status) in children.iter_mut().zip(&mut status) {
            if status.is_none() {
                *status = child.try_wait().unwrap();
            }
        }
        thread::sleep(Duration::from_millis(2));
    }
    for child in &mut children {
        let _ = child.kill();
        let _ = child.wait();
    }
    status
}

/// Runs the body of `test` in a process of its own.
pub(crate) fn alone(test: &str, environment: &[(&str, &str)], body: impl FnOnce()) {
    if role(test).is_some() {
        return body();
    }
    let place = new_place();
    let alone = spawn(child(test, "alone", &place, environment));
    let status = join(vec![alone]);
    fs::remove_dir_all(&place).unwrap();
    match status[0] {
        Some(status) => assert!(status.success(), "{test} ended with {status}"),
        None => panic!("{test} did not end in {DEADLINE:?}"),
    }
}

/// One of the processes of [`processes`].
pub(crate) struct Process {
    pub(crate) rank: i32,
    pub(crate) ranks: i32,
    place: PathBuf,
}

impl Process {
    /// Marks that this process has reached a point.
    pub(crate) fn mark(&self, point: &str) {
        fs::write(self.place.join(point), "").unwrap();
    }

    /// Whether a process has reached this point.
    pub(crate) fn is_marked(&self, point: &str) -> bool {
        self.place.join(point).exists()
    }

    /// Waits until a process has reached this point.
    pub(crate) fn wait_for(&self, point: &str) {
        let file = self.place.join(point);
        wait_until(point, || file.exists());
    }

    /// The file of that name in the directory that the processes share.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.place.join(name)
    }

    /// A unique id, made by rank 0.
    pub(crate) fn id(&self, name: &str) -> ncclUniqueId {
        if self.rank == 0 {
            let id = unique_id();
            self.put_id(name, &id);
            return id;
        }
        self.get_id(name)
    }

    /// Publishes an id for the other processes.
    pub(crate) fn put_id(&self, name: &str, id: &ncclUniqueId) {
        let bytes = id.internal.map(|byte| byte as u8);
        fs::write(self.place.join("id.part"), bytes).unwrap();
        fs::rename(self.place.join("id.part"), self.place.join(name)).unwrap();
    }

    /// Waits for an id that another process publishes, and returns it.
    pub(crate) fn get_id(&self, name: &str) -> ncclUniqueId {
        let file = self.place.join(name);
        wait_until("the unique id is there", || file.exists());
        let bytes: [u8; 128] = fs::read(file).unwrap().try_into().unwrap();
        ncclUniqueId {
            internal: bytes.map(|byte| byte as std::ffi::c_char),
        }
    }

    /// This process's rank of a blocking communicator of all.
    pub(crate) fn join(&self) -> Rank {
        Rank::join(self.id("id"), self.ranks, self.rank)
    }
}

/// Runs the body of `test` in `ranks` processes, and checks how each of them ended.
pub(crate) fn processes_ending(
    test: &str,
    ranks: i32,
    environment: &[(&str, &str)],
    ending: impl Fn(i32, ExitStatus) -> bool,
    body: impl FnOnce(Process),
) {
    let started = Started {
        start: &|_, command| spawn(command),
        meanwhile: &|_| (),
    };
    processes_started(test, ranks, environment, started, ending, body);
}

/// How the processes of a test are started, and what the test does while they run.
pub(crate) struct Started<'a> {
    /// Starts the process of a rank.
    pub(crate) start: &'a dyn Fn(i32, Command) -> Child,
    /// Runs in the test itself, with a [`Process`] that has no rank, to meet the others.
    pub(crate) meanwhile: &'a dyn Fn(&Process),
}

/// [`processes_ending`], where the test starts the processes itself and has something to do while they run.
pub(crate) fn processes_started(
    test: &str,
    ranks: i32,
    environment: &[(&str, &str)],
    started: Started<'_>,
    ending: impl Fn(i32, ExitStatus) -> bool,
    body: impl FnOnce(Process),
) {
    if let Some(role) = role(test) {
        let place = std::env::var_os(PLACE).unwrap().into();
        return body(Process {
            rank: role.parse().unwrap(),
            ranks,
            place,
        });
    }
    let place = new_place();
    let spawn = |rank: i32| {
        let command = child(test, &rank.to_string(), &place, environment);
        (started.start)(rank, command)
    };
    let children = (0..ranks).map(spawn).collect();
    (started.meanwhile)(&Process {
        rank: -1,
        ranks,
        place: place.clone(),
    });
    let status = join(children);
    fs::remove_dir_all(&place).unwrap();
    for (rank, status) in status.into_iter().enumerate() {
        match status {
            Some(status) => {
                assert!(
                    ending(rank as i32, status),
                    "rank {rank} of {test} ended with {status}"
                );
            }
            None => panic!("rank {rank} of {test} did not end in {DEADLINE:?}"),
        }
    }
}

/// [`processes_ending`], where all processes have to succeed.
pub(crate) fn processes(
    test: &str,
    ranks: i32,
    environment: &[(&str, &str)],
    body: impl FnOnce(Process),
) {
    processes_ending(test, ranks, environment, |_, status| status.success(), body);
}

/// A unique id.
pub(crate) fn unique_id() -> ncclUniqueId {
    let mut id = ncclUniqueId::default();
    assert_eq!(nccl!(ncclGetUniqueId(&mut id)), 0, "{}", last_error());
    id
}

/// A communicator's rank with a device and a stream of its own.
pub(crate) struct Rank {
    pub(crate) rank: i32,
    pub(crate) ranks: i32,
    pub(crate) comm: ncclComm_t,
    pub(crate) gpu: Arc<CudaContext>,
    pub(crate) stream: Arc<CudaStream>,
}

// SAFETY: a handle; the tests say which thread may use it when.
unsafe impl Send for Rank {}
// SAFETY: as above.
unsafe impl Sync for Rank {}

impl Rank {
    /// A rank with a device and a stream, and no communicator yet. Ranks share devices where there are too few.
    pub(crate) fn alone(ranks: i32, rank: i32) -> Self {
        api();
        let devices = CudaContext::device_count().unwrap();
        let gpu = CudaContext::new((rank % devices) as usize).unwrap();
        let stream = gpu.new_stream().unwrap();
        Self {
            rank,
            ranks,
            comm: std::ptr::null_mut(),
            gpu,
            stream,
        }
    }

    /// A rank of a new blocking communicator.
    pub(crate) fn join(id: ncclUniqueId, ranks: i32, rank: i32) -> Self {
        let mut this = Self::alone(ranks, rank);
        let code = nccl!(ncclCommInitRank(&mut this.comm, ranks, id, rank));
        assert_eq!(code, 0, "{}", last_error());
        this
    }

    /// A rank of a new non-blocking communicator, whose init is complete.
    pub(crate) fn join_nonblocking(id: ncclUniqueId, ranks: i32, rank: i32) -> Self {
        let mut this = Self::alone(ranks, rank);
        let mut config = NCCL_CONFIG_INITIALIZER;
        config.blocking = 0;
        let code = nccl!(ncclCommInitRankConfig(
            &mut this.comm,
            ranks,
            id,
            rank,
            &mut config
        ));
        assert!(matches!(code, 0 | 7), "{}", last_error());
        assert_eq!(this.settle(), 0, "{}", last_error());
        this
    }

    /// The state of the communicator.
    pub(crate) fn state(&self) -> u32 {
        let mut state = ncclResult_t(99);
        assert_eq!(
            nccl!(ncclCommGetAsyncError(self.comm, &mut state)),
            0,
            "{}",
            last_error()
        );
        state.0
    }

    /// The state of the communicator once it is not busy.
    pub(crate) fn settle(&self) -> u32 {
        wait_until("the communicator is not busy", || self.state() != 7);
        self.state()
    }

    /// The stream as NCCL's type.
    pub(crate) fn cuda_stream(&self) -> nccl_sys::cudaStream_t {
        self.stream.cu_stream().cast()
    }

    /// Device memory with these values.
    pub(crate) fn memory<T: Copy + Default>(&self, values: &[T]) -> Memory<T> {
        Memory::new(&self.gpu, values)
    }

    /// Waits for the stream.
    pub(crate) fn sync(&self) {
        self.gpu.bind_to_thread().unwrap();
        self.stream.synchronize().unwrap();
    }

    /// Whether the stream has nothing to do.
    pub(crate) fn is_idle(&self) -> bool {
        self.gpu.bind_to_thread().unwrap();
        // SAFETY: the stream lives.
        match unsafe { cudarc::driver::sys::cuStreamQuery(self.stream.cu_stream()) } {
            cudarc::driver::sys::CUresult::CUDA_SUCCESS => true,
            cudarc::driver::sys::CUresult::CUDA_ERROR_NOT_READY => false,
            other => panic!("cuStreamQuery: {other:?}"),
        }
    }

    pub(crate) fn send<T>(&self, from: &Memory<T>, kind: ncclDataType_t, peer: i32) -> u32 {
        nccl!(ncclSend(
            from.ptr(),
            from.len,
            kind,
            peer,
            self.comm,
            self.cuda_stream()
        ))
    }

    pub(crate) fn receive<T>(&self, to: &Memory<T>, kind: ncclDataType_t, peer: i32) -> u32 {
        nccl!(ncclRecv(
            to.ptr(),
            to.len,
            kind,
            peer,
            self.comm,
            self.cuda_stream()
        ))
    }

    pub(crate) fn all_reduce<T>(
        &self,
        from: &Memory<T>,
        to: &Memory<T>,
        kind: ncclDataType_t,
        operator: ncclRedOp_t,
    ) -> u32 {
        let (send, receive) = (from.ptr(), to.ptr());
        let stream = self.cuda_stream();
        nccl!(ncclAllReduce(
            send, receive, from.len, kind, operator, self.comm, stream
        ))
    }

    pub(crate) fn all_to_all<T>(
        &self,
        from: &Memory<T>,
        to: &Memory<T>,
        kind: ncclDataType_t,
    ) -> u32 {
        let count = from.len / self.ranks as usize;
        nccl!(ncclAlltoAll(
            from.ptr(),
            to.ptr(),
            count,
            kind,
            self.comm,
            self.cuda_stream()
        ))
    }

    pub(crate) fn abort(&self) -> u32 {
        nccl!(ncclCommAbort(self.comm))
    }

    pub(crate) fn destroy(self) {
        assert_eq!(nccl!(ncclCommDestroy(self.comm)), 0, "{}", last_error());
    }
}

/// Device memory.
pub(crate) struct Memory<T> {
    pub(crate) address: u64,
    pub(crate) len: usize,
    gpu: Arc<CudaContext>,
    kind: PhantomData<T>,
}

impl<T: Copy + Default> Memory<T> {
    fn new(gpu: &Arc<CudaContext>, values: &[T]) -> Self {
        gpu.bind_to_thread().unwrap();
        let bytes = size_of_val(values).max(1);
        // SAFETY: the size is not 0, and the memory is as large as what is copied to it.
        let address = unsafe {
            let address = result::malloc_sync(bytes).unwrap();
            if !values.is_empty() {
                result::memcpy_htod_sync(address, values).unwrap();
            }
            address
        };
        Self {
            address,
            len: values.len(),
            gpu: Arc::clone(gpu),
            kind: PhantomData,
        }
    }

    /// The current contents.
    pub(crate) fn read(&self) -> Vec<T> {
        self.gpu.bind_to_thread().unwrap();
        let mut values = vec![T::default(); self.len];
        if self.len > 0 {
            // SAFETY: the memory has as many values.
            unsafe { result::memcpy_dtoh_sync(&mut values, self.address).unwrap() };
        }
        values
    }
}

impl<T> Memory<T> {
    /// The address as NCCL's functions take it.
    pub(crate) fn ptr(&self) -> *mut c_void {
        std::ptr::without_provenance_mut(self.address as usize)
    }

    /// Frees the memory, once its device is idle.
    pub(crate) fn free(&self) {
        self.gpu.bind_to_thread().unwrap();
        // SAFETY: the memory was allocated and is not freed.
        unsafe { result::free_sync(self.address).unwrap() };
    }

    /// Frees the memory at once, on a stream that waits for no other.
    pub(crate) fn free_under_work(&self) {
        let stream = self.gpu.new_stream().unwrap();
        // SAFETY: as above; that operations still use the memory is what the test is about.
        unsafe { result::free_async(self.address, stream.cu_stream()).unwrap() };
        stream.synchronize().unwrap();
    }
}

/// Runs `body` for each rank of a blocking communicator, on a thread each, and destroys it.
pub(crate) fn threads(ranks: i32, body: impl Fn(&Rank) + Sync) {
    let id = unique_id();
    thread::scope(|scope| {
        for rank in 0..ranks {
            let body = &body;
            scope.spawn(move || {
                let rank = Rank::join(id, ranks, rank);
                body(&rank);
                rank.sync();
                rank.destroy();
            });
        }
    });
}

/// A host function that blocks a rank's stream until the gate is opened, or for [`DEADLINE`].
pub(crate) struct Gate(std::sync::mpsc::Sender<()>);

impl Gate {
    pub(crate) fn on(rank: &Rank) -> Self {
        unsafe extern "C" fn wait(argument: *mut c_void) {
            // SAFETY: the box was leaked for this one call.
            let receiver =
                *unsafe { Box::from_raw(argument.cast::<std::sync::mpsc::Receiver<()>>()) };
            let _ = receiver.recv_timeout(DEADLINE);
        }
        let (sender, receiver) = std::sync::mpsc::channel::<()>();
        let argument = Box::into_raw(Box::new(receiver)).cast();
        rank.gpu.bind_to_thread().unwrap();
        let stream = rank.stream.cu_stream();
        // SAFETY: the argument is valid for one call, and the stream makes exactly one.
        unsafe { result::stream::launch_host_function(stream, wait, argument) }.unwrap();
        Self(sender)
    }

    pub(crate) fn open(self) {
        self.0.send(()).unwrap();
    }
}
