//! The references of NCCL's own code to the CUDA runtime inside the library.
//!
//! The wheel's libnccl is linked from three kinds of code: NCCL's, the host stubs that nvcc made for its kernels, and NVIDIA's
//! static CUDA runtime. The linker put the runtime into one contiguous range, in which each function is called `cuda*`,
//! `__cuda*` or `libcudart_static_*`; code outside of this range is NCCL's. Two start-up functions of the runtime are elsewhere
//! and are identified by their names. A second source confirms this: no compilation unit in the debug information, which the
//! runtime lacks, may lie in the range.
//!
//! All code outside of the range is decoded symbol by symbol. Every branch, call and `lea` into the range must lead to a public
//! function of the runtime and have a 32-bit displacement; anything else is an error, as is a pointer to such a function in the
//! library's data. Thus the list of sites is complete.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use iced_x86::{Code as Opcode, Decoder, DecoderOptions, Instruction};
use serde::{Deserialize, Serialize};

use super::error::LoadError;
use super::file::{Code, ElfFile, Kind, Sections, Symbol};
use super::wanted;

/// A function of the runtime.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RuntimeFunction {
    pub(crate) name: String,
    pub(crate) address: u64,
}

/// A 32-bit displacement, relative to its own end, that leads to a function of the runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Site {
    pub(crate) address: u64,
    /// The index of the function.
    pub(crate) function: u16,
}

/// An object of the library.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Data {
    pub(crate) name: String,
    pub(crate) address: u64,
    pub(crate) size: u64,
}

/// The result of reading the symbol tables and the code. Addresses are relative to the library's base.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Calls {
    /// The address range of the runtime.
    pub(crate) runtime: Range<u64>,
    /// The functions of the runtime that NCCL refers to, by address.
    pub(crate) functions: Vec<RuntimeFunction>,
    /// All references, by address.
    pub(crate) sites: Vec<Site>,
    /// The host stubs of kernels: address and mangled name.
    pub(crate) kernels: BTreeMap<u64, String>,
    /// The objects of [`wanted::DATA`] that the library has.
    pub(crate) data: Vec<Data>,
    /// The exported functions `nccl*` and `pnccl*`.
    pub(crate) exports: Vec<RuntimeFunction>,
    /// The address range of the table of exported symbols.
    pub(crate) symbols: Range<u64>,
    /// The version of CUDA that the library was compiled with: 13040 for 13.4.
    pub(crate) cuda: i32,
}

/// Reads the symbol tables and decodes NCCL's code.
pub(crate) fn read(file: &ElfFile<'_>, sections: &Sections<'_>) -> Result<Calls, LoadError> {
    let path = || file.path().to_owned();
    let exports: Vec<RuntimeFunction> = sections
        .exports()?
        .iter()
        .filter(|symbol| symbol.kind == Kind::Function)
        .filter(|symbol| symbol.name.starts_with("nccl") || symbol.name.starts_with("pnccl"))
        .map(|symbol| RuntimeFunction {
            name: symbol.name.to_owned(),
            address: symbol.address,
        })
        .collect();
    if !exports.iter().any(|export| export.name == "ncclGetVersion") {
        return Err(LoadError::NotNccl { path: path() });
    }
    let Some(symbols) = sections.symbols()? else {
        return Err(LoadError::Stripped { path: path() });
    };
    let functions = Functions::new(&symbols);
    let Some(runtime) = functions.runtime() else {
        return Err(LoadError::Runtime {
            path: path(),
            found: "no functions cudaGetDevice and cudaMalloc among libcudart_static_*".to_owned(),
        });
    };
    let mut references = References {
        file,
        functions: &functions,
        public: functions.public(&runtime),
        runtime,
        found: Vec::new(),
        kernels: 0,
    };
    for code in sections.code()? {
        references.decode(code)?;
    }
    if let Some(pointer) = sections
        .pointers()?
        .into_iter()
        .find(|pointer| references.public.contains_key(pointer))
    {
        return Err(references.refused(pointer, pointer, "a pointer in its data"));
    }
    let kernels = references.host_stubs(&symbols);
    if kernels.len() != references.kernels {
        return Err(LoadError::Kernels {
            path: path(),
            registered: references.kernels,
            known: kernels.len(),
        });
    }
    let cuda = sections
        .cuda()?
        .ok_or_else(|| LoadError::NoCudaVersion { path: path() })?;
    let table = sections.dynamic_symbols()?;
    Ok(references.calls(&symbols, exports, table, kernels, cuda))
}

/// The functions of the symbol table, by address.
struct Functions<'a>(BTreeMap<u64, Function<'a>>);

struct Function<'a> {
    /// The alphabetically first name, if several names have one address.
    name: &'a str,
    end: u64,
    runtime: bool,
}

impl<'a> Functions<'a> {
    fn new(symbols: &[Symbol<'a>]) -> Self {
        let mut functions: BTreeMap<u64, Function<'a>> = BTreeMap::new();
        for symbol in symbols
            .iter()
            .filter(|symbol| symbol.kind == Kind::Function)
        {
            let end = symbol.address.saturating_add(symbol.size);
            let function = functions.entry(symbol.address).or_insert(Function {
                name: symbol.name,
                end,
                runtime: true,
            });
            function.name = function.name.min(symbol.name);
            function.end = function.end.max(end);
            function.runtime &= of_runtime(symbol.name);
        }
        Self(functions)
    }

    /// Returns the longest contiguous sequence of functions with names of the runtime.
    fn runtime(&self) -> Option<Range<u64>> {
        let mut rows: Vec<Range<u64>> = Vec::new();
        let mut inside = false;
        for (&address, function) in &self.0 {
            match rows.last_mut() {
                Some(row) if inside && function.runtime => row.end = row.end.max(function.end),
                _ if function.runtime => rows.push(address..function.end),
                _ => {}
            }
            inside = function.runtime;
        }
        let longest = rows
            .into_iter()
            .max_by_key(|row| row.end.saturating_sub(row.start))?;
        let has = |name| {
            self.0
                .range(longest.clone())
                .any(|(_, function)| function.name == name)
        };
        (has("cudaGetDevice") && has("cudaMalloc")).then_some(longest)
    }

    /// Returns the public functions of the runtime.
    fn public(&self, runtime: &Range<u64>) -> BTreeMap<u64, &'a str> {
        self.0
            .range(runtime.clone())
            .filter(|(_, function)| function.name.contains("cuda") && !is_internal(function.name))
            .map(|(&address, function)| (address, function.name))
            .collect()
    }

    /// Returns the function at or before `address`.
    fn at(&self, address: u64) -> Option<(u64, &Function<'a>)> {
        let (&start, function) = self.0.range(..=address).next_back()?;
        Some((start, function))
    }
}

fn is_internal(name: &str) -> bool {
    name.starts_with("libcudart_static_")
}

fn of_runtime(name: &str) -> bool {
    // nvcc's registration of each file of kernels, which lies outside of the runtime's range.
    let registration =
        name.starts_with("__cudaRegisterLinkedBinary") || name == "__cudaUnregisterBinaryUtil";
    is_internal(name) || (name.starts_with("cuda") || name.starts_with("__cuda")) && !registration
}

/// Returns the kernel for which nvcc made the function `name`, which passes the kernel's arguments on: in
/// `_Z71__device_stub__Z30ncclX…`, 71 characters are `__device_stub_` and the mangled kernel.
fn kernel_of_device_stub(name: &str) -> Option<&str> {
    let name = name
        .strip_prefix("_ZL")
        .or_else(|| name.strip_prefix("_Z"))?;
    let (length, rest) = name.split_at(name.find("__device_stub_")?);
    rest.get(..length.parse().ok()?)?
        .strip_prefix("__device_stub_")
}

struct References<'a> {
    file: &'a ElfFile<'a>,
    functions: &'a Functions<'a>,
    public: BTreeMap<u64, &'a str>,
    runtime: Range<u64>,
    /// The addresses of the displacement and of its target.
    found: Vec<(u64, u64)>,
    /// The number of kernels that the library's constructors register.
    kernels: usize,
}

impl References<'_> {
    /// Decodes a section, restarting at each function, and skips the runtime.
    fn decode(&mut self, code: Code<'_>) -> Result<(), LoadError> {
        let section = code.address..code.address.saturating_add(code.bytes.len() as u64);
        let starts: BTreeSet<u64> = self
            .functions
            .0
            .range(section.clone())
            .map(|(&at, _)| at)
            .collect();
        let mut start = section.start;
        for next in starts.into_iter().chain([section.end]) {
            let ours = self.runtime.contains(&start)
                || self
                    .functions
                    .0
                    .get(&start)
                    .is_some_and(|function| is_internal(function.name));
            let bytes = |at: u64| usize::try_from(at - section.start).ok();
            if let (false, Some(from), Some(to)) = (ours, bytes(start), bytes(next)) {
                self.decode_function(start, &code.bytes[from..to])?;
            }
            start = next;
        }
        Ok(())
    }

    fn decode_function(&mut self, start: u64, bytes: &[u8]) -> Result<(), LoadError> {
        let mut decoder = Decoder::with_ip(64, bytes, start, DecoderOptions::NONE);
        let mut instruction = Instruction::default();
        while decoder.can_decode() {
            decoder.decode_out(&mut instruction);
            let address = instruction.ip();
            if instruction.is_invalid() {
                // The linker fills the end of a section with zeros.
                let offset = usize::try_from(address - start).unwrap_or(0);
                if bytes[offset..].iter().all(|&byte| byte == 0) {
                    return Ok(());
                }
                return Err(self.refused(address, address, "bytes that are no instruction"));
            }
            let target = if instruction.is_ip_rel_memory_operand() {
                instruction.ip_rel_memory_address()
            } else {
                // 0 where the instruction is not a near branch.
                instruction.near_branch_target()
            };
            if !self.runtime.contains(&target) {
                continue;
            }
            let Some(&name) = self.public.get(&target) else {
                return Err(self.refused(
                    address,
                    target,
                    "a branch past the runtime's public functions",
                ));
            };
            if wanted::registers(name) {
                self.kernels += usize::from(name == "__cudaRegisterFunction");
                continue;
            }
            let constants = decoder.get_constant_offsets(&instruction);
            let (offset, size) = if instruction.is_ip_rel_memory_operand() {
                if instruction.code() != Opcode::Lea_r64_m {
                    return Err(self.refused(address, target, "an access to its code"));
                }
                (
                    constants.displacement_offset(),
                    constants.displacement_size(),
                )
            } else {
                (constants.immediate_offset(), constants.immediate_size())
            };
            if size != 4 || offset + size != instruction.len() {
                return Err(self.refused(address, target, "a short displacement"));
            }
            self.found.push((address + offset as u64, target));
        }
        Ok(())
    }

    fn refused(&self, address: u64, target: u64, by: &'static str) -> LoadError {
        let name = |address| {
            self.functions.at(address).map_or_else(
                || format!("{address:#x}"),
                |(_, function)| function.name.to_owned(),
            )
        };
        LoadError::Reference {
            path: self.file.path().to_owned(),
            function: name(address),
            target: name(target),
            address,
            by,
        }
    }

    /// Returns the functions whose addresses identify kernels in host code, and the kernels' mangled names.
    ///
    /// nvcc makes two functions for a kernel, the second of which may be inlined in the first, and names both after the kernel.
    /// A function that launches a kernel with `<<<>>>` may have inlined both.
    fn host_stubs(&self, symbols: &[Symbol<'_>]) -> BTreeMap<u64, String> {
        let callers = |name: &str| -> BTreeMap<u64, &str> {
            let calls = self
                .found
                .iter()
                .filter(|(_, target)| self.public.get(target) == Some(&name));
            let functions = calls.filter_map(|&(address, _)| self.functions.at(address));
            functions
                .map(|(start, function)| (start, function.name))
                .collect()
        };
        let launchers = callers("__cudaPushCallConfiguration");
        let mut kernels: BTreeMap<u64, String> = callers("__cudaPopCallConfiguration")
            .into_iter()
            .filter(|(start, name)| {
                !name.contains("__device_stub_") && !launchers.contains_key(start)
            })
            .map(|(start, name)| (start, name.to_owned()))
            .collect();
        let named: BTreeSet<&str> = symbols
            .iter()
            .filter_map(|symbol| kernel_of_device_stub(symbol.name))
            .collect();
        let stubs = symbols
            .iter()
            .filter(|symbol| symbol.kind == Kind::Function && named.contains(symbol.name));
        kernels.extend(stubs.map(|symbol| (symbol.address, symbol.name.to_owned())));
        kernels
    }

    fn calls(
        self,
        symbols: &[Symbol<'_>],
        exports: Vec<RuntimeFunction>,
        table: Range<u64>,
        kernels: BTreeMap<u64, String>,
        cuda: i32,
    ) -> Calls {
        let used: BTreeSet<u64> = self.found.iter().map(|&(_, target)| target).collect();
        let functions: Vec<RuntimeFunction> = self
            .public
            .iter()
            .filter(|(address, _)| used.contains(address))
            .map(|(&address, &name)| RuntimeFunction {
                name: name.to_owned(),
                address,
            })
            .collect();
        let mut sites = Vec::with_capacity(self.found.len());
        for &(address, target) in &self.found {
            let found = functions.binary_search_by_key(&target, |function| function.address);
            // The runtime has some 600 public functions.
            let Some(function) = found.ok().and_then(|index| u16::try_from(index).ok()) else {
                continue;
            };
            sites.push(Site { address, function });
        }
        sites.sort_unstable_by_key(|site| site.address);
        let data = symbols
            .iter()
            .filter(|symbol| symbol.kind == Kind::Object && wanted::DATA.contains(&symbol.name))
            .map(|symbol| Data {
                name: symbol.name.to_owned(),
                address: symbol.address,
                size: symbol.size,
            })
            .collect();
        Calls {
            runtime: self.runtime,
            functions,
            sites,
            kernels,
            data,
            exports,
            symbols: table,
            cuda,
        }
    }
}
