//! Libraries made by the C compiler from `library.c` and `runtime.c`.

use std::ffi::{c_int, c_void};
use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use nccl_sys::Version;
use rustix::fs::{FlockOperation, flock};
use tempfile::TempDir;

use super::super::cache::{Analysis, Cache, CacheUse, Key};
use super::super::dwarf;
use super::super::error::LoadError;
use super::super::file::{ElfFile, Source};
use super::super::library::{Provided, RealNccl, analyse, load_with};
use super::super::types::{Bits, Field, LayoutError, Library, Types};
use super::{NOT_SUPPORTED, REFUSED, address, cache_in, refused};

const KNOWN: &str = "-DVERSION=23203";

/// A library and what else a test needs of files.
struct Made {
    directory: TempDir,
    library: PathBuf,
}

/// Compiles `library.c` with `options`, and links it with the runtime.
fn make(options: &[&str]) -> Made {
    let directory = tempfile::tempdir().unwrap();
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/real/tests");
    let at = |name: &str| directory.path().join(name);
    let run = |arguments: &mut Command| {
        let output = arguments.output().expect("cc, which links this test, runs");
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
    };
    let common = ["-O2", "-fPIC", "-fvisibility=hidden"];
    let (object, runtime, library) = (at("library.o"), at("runtime.o"), at("libnccl.so.2"));
    let compile = options.iter().filter(|option| !option.starts_with("-Wl"));
    let link = options.iter().filter(|option| option.starts_with("-Wl"));
    run(Command::new("cc")
        .args(common)
        .args(compile)
        .arg("-c")
        .arg(sources.join("library.c"))
        .arg("-o")
        .arg(&object));
    run(Command::new("cc")
        .args(common)
        .arg("-g0")
        .arg("-c")
        .arg(sources.join("runtime.c"))
        .arg("-o")
        .arg(&runtime));
    run(Command::new("cc")
        .args(["-shared", "-Wl,--build-id=sha1"])
        .args(link)
        .arg(&object)
        .arg(&runtime)
        .arg("-o")
        .arg(&library));
    Made { directory, library }
}

impl Made {
    fn analyse(&self) -> Result<Analysis, LoadError> {
        analyse_file(&self.library)
    }

    fn load(&self, functions: &[(&'static str, *const c_void)]) -> Result<RealNccl, LoadError> {
        load_with(
            &self.library,
            Provided {
                functions: &|_| functions.to_vec(),
                refused,
            },
            &cache_in(self.directory.path()),
        )
    }

    fn cache(&self) -> Cache {
        cache_in(self.directory.path())
    }
}

fn analyse_file(path: &Path) -> Result<Analysis, LoadError> {
    let source = Source::open(path)?;
    let file = ElfFile::parse(&source)?;
    file.build_id()?;
    file.span()?;
    analyse(&file)
}

extern "C" fn nine() -> c_int {
    9
}

fn all() -> [(&'static str, *const c_void); 3] {
    ["cudaGetDevice", "cudaMalloc", "cudaFree"].map(|name| (name, address(nine)))
}

/// An exported function without arguments, or with one pointer.
fn export(nccl: &RealNccl, name: &str) -> extern "C" fn(*mut c_int) -> usize {
    let symbols = nccl.nccl_symbols();
    let (_, address) = symbols
        .iter()
        .find(|(found, _)| found.to_str() == Ok(name))
        .unwrap();
    // SAFETY: the functions of library.c take at most a pointer, and return a word or half of one.
    unsafe { std::mem::transmute(*address) }
}

#[test]
fn calls_jumps_and_addresses_lead_to_ours_and_the_runtime_still_calls_itself() {
    let made = make(&[KNOWN, "-g"]);
    let nccl = made.load(&all()).unwrap();
    assert_eq!(nccl.version(), Version::new(2, 32, 3));
    let mut device = 0;
    assert_eq!(export(&nccl, "ncclCall")(&mut device) as c_int, 10);
    assert_eq!(export(&nccl, "ncclJump")(&mut device) as c_int, 9);
    assert_eq!(device, 0, "ours leaves it alone");
    let free = export(&nccl, "ncclAddress")(&mut device);
    // SAFETY: what the library believes to be cudaFree is the trampoline to `nine`.
    let free: extern "C" fn() -> c_int = unsafe { std::mem::transmute(free) };
    assert_eq!(free(), 9);
    // The constructor's three calls went to the runtime.
    assert_eq!(export(&nccl, "ncclRegistered")(&mut device) as c_int, 21);

    // The runtime's cudaMalloc, which nothing leads to any more, calls the runtime's cudaGetDevice.
    let calls = made.analyse().unwrap().calls;
    let of = |name: &str| {
        calls
            .functions
            .iter()
            .chain(&calls.exports)
            .find(|function| function.name == name)
            .unwrap()
            .address
    };
    let base = export(&nccl, "ncclCall") as usize as u64 - of("ncclCall");
    // SAFETY: the address is that of the runtime's function with this signature.
    let malloc: extern "C" fn(*mut usize, u64) -> c_int =
        unsafe { std::mem::transmute((base + of("cudaMalloc")) as usize) };
    let mut pointer = 0_usize;
    assert_eq!((malloc(&mut pointer, 100), pointer), (0, 142));
}

#[test]
fn a_host_stub_has_its_kernel_and_its_launch_is_refused_by_name() {
    let made = make(&[KNOWN, "-g"]);
    let nccl = made.load(&all()).unwrap();
    let kernel =
        |inlined: c_int| export(&nccl, "ncclKernel")(&mut inlined.clone()) as *const c_void;
    assert_eq!(nccl.kernel_of(kernel(0)), Some("kernel"));
    let launcher = export(&nccl, "ncclLaunch") as *const c_void;
    assert_eq!(nccl.kernel_of(launcher), None);
    let stub = kernel(1);
    assert_eq!(nccl.kernel_of(stub), Some("kernel_inlined"));
    assert_eq!(nccl.kernel_of(stub.wrapping_byte_add(1)), None);
    // SAFETY: the address is that of `kernel_inlined`.
    let stub: extern "C" fn() -> c_int = unsafe { std::mem::transmute(stub) };
    assert_eq!(stub(), NOT_SUPPORTED + 1);
    assert!(
        REFUSED
            .lock()
            .contains(&"__cudaPopCallConfiguration".to_owned())
    );
    let table = nccl.data("ncclDevFuncIdCount").unwrap();
    // SAFETY: the table has three integers, as library.c says and its size confirms.
    let values = unsafe { table.address.cast::<[c_int; 3]>().read() };
    assert_eq!((table.size, values), (12, [4, 5, 6]));
    assert_eq!(nccl.data("ncclDevKernelList"), None);
}

#[test]
fn each_library_that_is_not_as_expected_is_refused_with_what_it_lacks() {
    for (options, provided, expected) in [
        (&["-g"][..], 3, "exports no ncclGetVersion"),
        (&[KNOWN, "-g", "-Wl,-s"], 3, "has no symbol table"),
        (&[KNOWN, "-g", "-Wl,-S"], 3, ".debug_info is missing"),
        (
            &[KNOWN, "-g", "-Wl,--compress-debug-sections=zlib"],
            3,
            "is compressed",
        ),
        (&[KNOWN, "-g", "-Wl,--build-id=none"], 3, "has no build ID"),
        (&[KNOWN, "-g", "-DPOINTER"], 3, "refers to cudaGetDevice"),
        (
            &[KNOWN, "-g", "-DUNREGISTERED"],
            3,
            "registers 1 kernels, but 2 host stubs",
        ),
        (
            &[KNOWN, "-g", "-DPRIVATE"],
            3,
            "ncclPrivate refers to libcudart_static_end",
        ),
        (&[KNOWN, "-g"], 2, "NCCL calls cudaFree, which"),
        (
            &["-DVERSION=22606", "-g"],
            3,
            "is NCCL 2.26.6; expected one of 2.27.7, 2.30.7, 2.32.3",
        ),
    ] {
        let made = make(options);
        let error = made.load(&all()[..provided]).unwrap_err().to_string();
        assert!(error.contains(expected), "{options:?}: {error}");
        assert!(error.contains("libnccl.so.2"), "{error}");
    }
}

#[test]
fn a_refused_library_is_not_left_in_the_process() {
    let made = make(&[KNOWN, "-g"]);
    made.load(&all()[..1]).unwrap_err();
    // It could not be loaded if it were there.
    made.load(&all()).unwrap();
    let again = made.load(&all()).unwrap_err();
    assert!(matches!(again, LoadError::AlreadyLoaded { .. }), "{again}");
}

#[test]
fn files_that_are_no_library_for_this_cpu_are_refused() {
    let made = make(&[KNOWN, "-g"]);
    let good = fs::read(&made.library).unwrap();
    let changed = |at: usize, value: u8| {
        let mut bytes = good.clone();
        bytes[at] = value;
        bytes
    };
    let path = made.directory.path().join("other");
    for (bytes, expected) in [
        (b"hello".to_vec(), "not an ELF file"),
        (
            b"a text that is longer than a header".to_vec(),
            "not an ELF file",
        ),
        (changed(18, 183), "made for AArch64"),
        (changed(18, 40), "made for ELF machine 40"),
        (changed(4, 1), "made for x86-64, ELF class 1"),
        (good[..good.len() - 100].to_vec(), "damaged or incomplete"),
    ] {
        fs::write(&path, bytes).unwrap();
        let error = analyse_file(&path).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let error = analyse_file(Path::new("/nowhere/libnccl.so.2"))
        .unwrap_err()
        .to_string();
    assert!(
        error.starts_with("/nowhere/libnccl.so.2: cannot be read (No such file"),
        "{error}"
    );
    let error = analyse_file(made.directory.path()).unwrap_err();
    assert!(matches!(error, LoadError::NotElf { .. }), "{error}");
}

#[test]
fn damaged_files_are_read_without_a_panic() {
    let made = make(&[KNOWN, "-g"]);
    let good = fs::read(&made.library).unwrap();
    let path = made.directory.path().join("damaged");
    for length in (0..good.len()).step_by(97) {
        fs::write(&path, &good[..length]).unwrap();
        analyse_file(&path).unwrap_err();
    }
    fs::write(&path, &good).unwrap();
    let file = fs::File::options().write(true).open(&path).unwrap();
    let (mut bad, mut fine) = (0, 0);
    // Each byte of the header, and every few of everything else: symbols, code, debug information,
    // section headers.
    for at in (0..64).chain((64..good.len()).step_by(11)) {
        for value in [0, 0xff, good[at] ^ 0x80, good[at].wrapping_add(1)] {
            file.write_all_at(&[value], at as u64).unwrap();
            match analyse_file(&path) {
                Ok(_) => fine += 1,
                Err(_) => bad += 1,
            }
        }
        file.write_all_at(&good[at..=at], at as u64).unwrap();
    }
    assert!(bad > 300 && fine > 300, "{bad} refused, {fine} read");
    analyse_file(&path).unwrap();
}

/// The layouts of the types of library.c.
fn layouts(options: &[&str]) -> Types {
    let made = make(options);
    let source = Source::open(&made.library).unwrap();
    let file = ElfFile::parse(&source).unwrap();
    let sections = file.sections().unwrap();
    let debug = dwarf::Sections {
        info: sections.debug(".debug_info").unwrap(),
        abbrev: sections.debug(".debug_abbrev").unwrap(),
        strings: sections.debug(".debug_str").unwrap(),
        aranges: sections.debug(".debug_aranges").unwrap(),
    };
    let table = dwarf::read(debug, &["shape_t", "inner", "mode", "declared", "nothing"]).unwrap();
    let library = Library {
        path: "/lib/libnccl.so.2".into(),
        build_id: "0123".to_owned(),
    };
    Types::new(library, table)
}

#[test]
fn layouts_are_those_of_the_compiler_in_dwarf_4_and_5() {
    for options in [[KNOWN, "-gdwarf-4"], [KNOWN, "-gdwarf-5"]] {
        let types = layouts(&options);
        let field = |path| types.field("shape_t", path).unwrap();
        let plain = |offset, size, count| Field {
            offset,
            size,
            count,
            bits: None,
        };
        let bits = |offset, first, count| Field {
            offset,
            size: 4,
            count: 1,
            bits: Some(Bits { first, count }),
        };
        assert_eq!(types.size_of("shape_t"), Ok(16 + 4 * 16 + 16));
        assert_eq!(field("first"), plain(0, 1, 1));
        assert_eq!(field("whole"), plain(8, 8, 1));
        assert_eq!(field("low"), bits(8, 0, 14));
        assert_eq!(field("middle"), bits(8, 14, 2));
        assert_eq!(field("high"), bits(8, 27, 5));
        assert_eq!(field("inners"), plain(16, 16, 4));
        assert_eq!(field("inners.list"), plain(20, 2, 6));
        assert_eq!(field("mode"), plain(80, 4, 1));
        assert_eq!(field("pointer"), plain(88, 8, 1));
        assert_eq!(types.field("inner", "step"), Ok(plain(0, 4, 1)));
        assert_eq!(types.enumerator("MODE_LOW"), Ok(-3));
        assert_eq!(types.enumerator("MODE_HIGH"), Ok(200));
        assert!(types.size_of("declared").is_err() && types.size_of("nothing").is_err());
    }
}

#[test]
fn what_a_build_lacks_is_named_with_the_build() {
    let types = layouts(&[KNOWN, "-g"]);
    for (error, expected) in [
        (types.size_of("nothing").map(drop), "has no type nothing"),
        (
            types.field("shape_t", "inner.sub").map(drop),
            "shape_t (96 bytes) has no field inner.sub",
        ),
        (
            types.enumerator("MODE_NONE").map(drop),
            "has no enumerator MODE_NONE",
        ),
    ] {
        let error: LayoutError = error.unwrap_err();
        let text = error.to_string();
        assert!(text.contains(expected), "{text}");
        assert!(text.contains("/lib/libnccl.so.2 (build ID 0123)"), "{text}");
    }
}

/// A cache that holds the analysis of `made`, and the file it is in.
fn filled(made: &Made) -> (Key, Analysis, PathBuf) {
    let analysis = made.analyse().unwrap();
    let key = Key {
        build_id: "0123".to_owned(),
        length: 4,
    };
    let (kept, used) = made.cache().get(&key, || Ok(analysis.clone())).unwrap();
    assert_eq!(kept, analysis);
    let CacheUse::Written(path) = used else {
        panic!("{used:?}");
    };
    (key, analysis, path)
}

#[test]
fn a_second_process_reads_the_cache_and_not_the_library() {
    let made = make(&[KNOWN, "-g"]);
    let (key, analysis, path) = filled(&made);
    let found = made
        .cache()
        .get(&key, || panic!("the library is read again"));
    assert_eq!(found.unwrap(), (analysis, CacheUse::Found(path)));
}

#[test]
fn a_cache_file_that_is_damaged_or_of_another_library_is_made_anew() {
    let made = make(&[KNOWN, "-g"]);
    let (key, analysis, path) = filled(&made);
    let good = fs::read(&path).unwrap();
    let get = |key: &Key| made.cache().get(key, || Ok(analysis.clone())).unwrap().1;
    let other = Key {
        length: 5,
        ..key.clone()
    };
    assert_eq!(get(&other), CacheUse::Written(path.clone()));
    assert_eq!(get(&key), CacheUse::Written(path.clone()));
    for length in [0, 10, 65, good.len() / 2, good.len() - 1] {
        fs::write(&path, &good[..length]).unwrap();
        assert_eq!(
            get(&key),
            CacheUse::Written(path.clone()),
            "cut to {length}"
        );
    }
    let mut changed = good.clone();
    let last = changed.iter().rposition(|byte| *byte == b'1').unwrap();
    changed[last] = b'2';
    fs::write(&path, &changed).unwrap();
    assert_eq!(get(&key), CacheUse::Written(path.clone()));
    // A file that every user may write to.
    fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).unwrap();
    assert_eq!(get(&key), CacheUse::Written(path.clone()));
    assert_eq!(get(&key), CacheUse::Found(path.clone()));
    assert_eq!(fs::read(&path).unwrap(), good);
}

#[test]
fn a_cache_directory_that_others_can_write_is_not_used() {
    let made = make(&[KNOWN, "-g"]);
    fs::set_permissions(made.directory.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let nccl = made.load(&all()).unwrap();
    assert!(
        matches!(nccl.cache(), CacheUse::None(reason) if reason.contains("mode 777")),
        "{:?}",
        nccl.cache()
    );
}

#[test]
fn the_environment_chooses_the_cache_directory() {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    let user = rustix::process::geteuid().as_raw();
    let used = |set: &[(&str, PathBuf)]| {
        let find = |name: &str| {
            let value = set.iter().find(|(found, _)| *found == name);
            value.map(|(_, path)| path.clone().into_os_string())
        };
        format!("{:?}", Cache::choose(find, root.path()))
    };
    let (own, xdg, home) = (at("own"), at("xdg"), at("home"));
    let all = [
        ("NCCL_EMULATOR_CACHE", own.clone()),
        ("XDG_CACHE_HOME", xdg.clone()),
        ("HOME", home.clone()),
    ];
    for (set, expected) in [
        (&all[..], own),
        (&all[1..], xdg.join("nccl-emulator")),
        (&all[2..], home.join(".cache/nccl-emulator")),
        (&[], at(&format!("nccl-emulator-{user}"))),
        (
            &[("HOME", PathBuf::from("/proc/nowhere"))],
            at(&format!("nccl-emulator-{user}")),
        ),
    ] {
        let text = used(set);
        assert!(text.contains(&format!("Ok({expected:?})")), "{text}");
    }
}

#[test]
fn a_process_waits_for_the_one_that_reads_the_library() {
    let made = make(&[KNOWN, "-g"]);
    let analysis = made.analyse().unwrap();
    let key = Key {
        build_id: "4567".to_owned(),
        length: 4,
    };
    let lock = fs::File::create(made.directory.path().join("4567.lock")).unwrap();
    flock(&lock, FlockOperation::NonBlockingLockExclusive).unwrap();
    let pause = Duration::from_millis(100);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let start = Instant::now();
            let (_, used) = made.cache().get(&key, || Ok(analysis.clone())).unwrap();
            (used, start.elapsed())
        });
        std::thread::sleep(pause);
        drop(lock);
        let (used, waited) = waiting.join().unwrap();
        assert!(matches!(used, CacheUse::Written(_)), "{used:?}");
        assert!(waited >= pause / 2, "{waited:?}");
    });
}
