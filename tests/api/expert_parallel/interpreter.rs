//! Executes the kernels' PTX on the host: the few instructions that they use, as defined in PTX's manual, one warp
//! after the other, with every access to memory checked.
//!
//! No GPU has run the kernels yet, and the emulator runs Rust functions in their place. This tests the PTX itself.

use std::collections::HashMap;

use half::f16;

/// The text of the kernels.
pub(crate) const PTX: &str =
    include_str!("../../../crates/nccl-moe/src/expert_parallel/kernels.ptx");

/// Device memory: buffers at addresses of their own.
#[derive(Default)]
pub(crate) struct Memory {
    buffers: Vec<(u64, Vec<u8>)>,
}

impl Memory {
    /// Adds a buffer with these bytes; returns its address, which is a multiple of 256.
    pub(crate) fn add(&mut self, bytes: Vec<u8>) -> u64 {
        let address = (self.buffers.len() as u64 + 1) << 32;
        self.buffers.push((address, bytes));
        address
    }

    /// The current contents of a buffer.
    pub(crate) fn bytes(&self, address: u64) -> &[u8] {
        let found = self.buffers.iter().find(|(start, _)| *start == address);
        &found.expect("a buffer").1
    }

    /// `len` bytes, aligned to their length as GPUs require.
    fn at(&mut self, address: u64, len: usize) -> &mut [u8] {
        assert!(
            address.is_multiple_of(len as u64),
            "{len} bytes at {address:#x}"
        );
        let found = self.buffers.iter_mut().find_map(|(start, bytes)| {
            let offset = usize::try_from(address.checked_sub(*start)?).ok()?;
            bytes.get_mut(offset..offset + len)
        });
        found.unwrap_or_else(|| panic!("{len} bytes at {address:#x} are in no buffer"))
    }

    fn load(&mut self, address: u64, len: usize) -> u64 {
        let mut value = [0; 8];
        value[..len].copy_from_slice(self.at(address, len));
        u64::from_le_bytes(value)
    }

    fn store(&mut self, address: u64, len: usize, value: u64) {
        self.at(address, len)
            .copy_from_slice(&value.to_le_bytes()[..len]);
    }
}

/// A launch: `[x, y]` of the grid, and the threads of a block.
#[derive(Clone, Copy)]
pub(crate) struct Grid {
    pub(crate) blocks: [u32; 2],
    pub(crate) threads: u32,
}

struct Instruction {
    /// The predicate, and the value that it must have.
    guard: Option<(String, bool)>,
    /// The operation and its qualifiers.
    code: Vec<String>,
    operands: Vec<String>,
}

/// One kernel of the text.
pub(crate) struct Kernel {
    parameters: Vec<String>,
    /// The bits of each register.
    widths: HashMap<String, u32>,
    body: Vec<Instruction>,
    labels: HashMap<String, usize>,
}

fn names(text: &str) -> Vec<String> {
    let trimmed = text.split(',').map(|one| one.trim().to_owned());
    trimmed.filter(|one| !one.is_empty()).collect()
}

/// Splits operands; operands in braces count as one.
fn operands(text: &str) -> Vec<String> {
    let (mut all, mut depth) = (vec![String::new()], 0);
    for letter in text.chars() {
        match letter {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                all.push(String::new());
                continue;
            }
            _ => {}
        }
        all.last_mut().expect("one").push(letter);
    }
    let trimmed = all.into_iter().map(|one| one.trim().to_owned());
    trimmed.filter(|one| !one.is_empty()).collect()
}

impl Kernel {
    pub(crate) fn of(name: &str) -> Self {
        let text: String = PTX
            .lines()
            .map(|line| line.split("//").next().unwrap_or_default())
            .collect::<Vec<_>>()
            .join("\n");
        let head = format!(".entry {name}(");
        let (_, rest) = text.split_once(&head).expect("a kernel");
        let (list, rest) = rest.split_once(')').expect("parameters");
        let parameters = names(list)
            .into_iter()
            .map(|one| one.rsplit(' ').next().expect("a name").to_owned());
        let (_, rest) = rest.split_once('{').expect("a body");
        let (body, _) = rest.split_once("\n}").expect("an end");
        let mut kernel = Self {
            parameters: parameters.collect(),
            widths: HashMap::new(),
            body: Vec::new(),
            labels: HashMap::new(),
        };
        // A label precedes the next statement.
        for statement in body.split(';') {
            let mut statement = statement.trim();
            while let Some((label, rest)) = statement.split_once(':') {
                kernel
                    .labels
                    .insert(label.trim().to_owned(), kernel.body.len());
                statement = rest.trim();
            }
            kernel.add(statement);
        }
        kernel
    }

    fn add(&mut self, statement: &str) {
        if statement.is_empty() {
            return;
        }
        if let Some(declared) = statement.strip_prefix(".reg .") {
            let (kind, list) = declared.split_once(' ').expect("registers");
            let bits = match kind {
                "pred" => 1,
                kind => kind[1..].parse().expect("bits"),
            };
            for name in names(list) {
                assert_eq!(self.widths.insert(name, bits), None, "{statement}");
            }
            return;
        }
        let (guard, statement) = match statement.strip_prefix('@') {
            None => (None, statement),
            Some(guarded) => {
                let (guard, rest) = guarded.split_once(' ').expect("an instruction");
                let wanted = !guard.starts_with('!');
                (
                    Some((guard.trim_start_matches('!').to_owned(), wanted)),
                    rest,
                )
            }
        };
        let (code, rest) = statement.split_once(' ').unwrap_or((statement, ""));
        self.body.push(Instruction {
            guard,
            code: code.split('.').map(str::to_owned).collect(),
            operands: operands(rest),
        });
    }

    /// Runs all blocks.
    pub(crate) fn run(&self, grid: Grid, arguments: &[u64], memory: &mut Memory) {
        assert_eq!(arguments.len(), self.parameters.len());
        for y in 0..grid.blocks[1] {
            for x in 0..grid.blocks[0] {
                for first in (0..grid.threads).step_by(32) {
                    let lanes = first..(first + 32).min(grid.threads);
                    let mut warp: Vec<_> = lanes
                        .map(|thread| Thread {
                            kernel: self,
                            arguments,
                            grid,
                            block: [x, y],
                            thread,
                            registers: HashMap::new(),
                            at: 0,
                        })
                        .collect();
                    run_warp(&mut warp, memory);
                }
            }
        }
    }
}

fn run_warp(warp: &mut [Thread<'_>], memory: &mut Memory) {
    let mut steps = 0u64;
    loop {
        let stopped: Vec<Stop> = warp
            .iter_mut()
            .map(|thread| thread.run(memory, &mut steps))
            .collect();
        if stopped.iter().all(|stop| matches!(stop, Stop::Ended)) {
            return;
        }
        // All lanes vote at the same place, or the warp would hang.
        let places: Vec<_> = warp.iter().map(|thread| thread.at).collect();
        assert!(
            places.iter().all(|at| *at == places[0]),
            "lanes at {places:?}"
        );
        assert_eq!(warp.len(), 32, "a vote of all 32 lanes");
        let mut mask = 0u32;
        for (lane, stop) in stopped.iter().enumerate() {
            let Stop::Vote(vote) = stop else {
                panic!("lane {lane} has ended before a vote")
            };
            mask |= u32::from(*vote) << lane;
        }
        for thread in warp.iter_mut() {
            thread.after_vote(mask);
        }
    }
}

enum Stop {
    Ended,
    Vote(bool),
}

struct Thread<'k> {
    kernel: &'k Kernel,
    arguments: &'k [u64],
    grid: Grid,
    block: [u32; 2],
    thread: u32,
    registers: HashMap<&'k str, u64>,
    at: usize,
}

/// The low `bits` bits of a value.
fn cut(value: u64, bits: u32) -> u64 {
    match bits {
        64 => value,
        bits => value & ((1 << bits) - 1),
    }
}

fn bits_of(kind: &str) -> u32 {
    match kind {
        "pred" => 1,
        kind => kind[1..].parse().expect("a type"),
    }
}

fn float(value: u64) -> f32 {
    f32::from_bits(value as u32)
}

impl<'k> Thread<'k> {
    fn run(&mut self, memory: &mut Memory, steps: &mut u64) -> Stop {
        loop {
            *steps += 1;
            assert!(*steps < 50_000_000, "it does not end");
            let kernel = self.kernel;
            let one = &kernel.body[self.at];
            let passes = one.guard.as_ref().is_none_or(|(predicate, wanted)| {
                (self.registers[predicate.as_str()] == 1) == *wanted
            });
            if !passes {
                self.at += 1;
                continue;
            }
            match one.code[0].as_str() {
                "ret" => return Stop::Ended,
                "vote" => {
                    assert_eq!(one.code[1..], ["sync", "ballot", "b32"]);
                    assert_eq!(self.value(&one.operands[2], 32), 0xffff_ffff);
                    return Stop::Vote(self.value(&one.operands[1], 1) == 1);
                }
                "bra" => self.at = kernel.labels[&one.operands[0]],
                _ => {
                    self.step(one, memory);
                    self.at += 1;
                }
            }
        }
    }

    fn after_vote(&mut self, mask: u32) {
        let kernel = self.kernel;
        self.set(&kernel.body[self.at].operands[0], 32, mask.into());
        self.at += 1;
    }

    fn set(&mut self, name: &'k str, bits: u32, value: u64) {
        let width = self.kernel.widths[name];
        assert_eq!(width, bits, "register {name}");
        self.registers.insert(name, cut(value, bits));
    }

    /// A register, a special one, or a number.
    fn value(&self, operand: &str, bits: u32) -> u64 {
        if let Some(width) = self.kernel.widths.get(operand) {
            assert_eq!(*width, bits, "register {operand}");
            let written = self.registers.get(operand);
            return *written.unwrap_or_else(|| panic!("{operand} is read before it is written"));
        }
        let special = match operand {
            "%tid.x" => Some(self.thread),
            "%ntid.x" => Some(self.grid.threads),
            "%ctaid.x" => Some(self.block[0]),
            "%ctaid.y" => Some(self.block[1]),
            "%nctaid.y" => Some(self.grid.blocks[1]),
            "%lanemask_lt" => Some((1 << (self.thread % 32)) - 1),
            _ => None,
        };
        let number = || {
            if let Some(digits) = operand.strip_prefix("0x").or(operand.strip_prefix("0f")) {
                return u64::from_str_radix(digits, 16).ok();
            }
            operand.parse::<i64>().ok().map(i64::cast_unsigned)
        };
        let value = special.map(u64::from).or_else(number);
        cut(value.unwrap_or_else(|| panic!("what is {operand}?")), bits)
    }

    fn step(&mut self, one: &'k Instruction, memory: &mut Memory) {
        let code: Vec<&str> = one.code.iter().map(String::as_str).collect();
        let operands: Vec<&'k str> = one.operands.iter().map(String::as_str).collect();
        let bits = bits_of(code.last().expect("a type"));
        let read = |this: &Self, at: usize| this.value(operands[at], bits);
        let signed = |value: u64| i64::from((value as u32).cast_signed());
        let address = |this: &Self, at: usize| {
            let name = operands[at].trim_start_matches('[').trim_end_matches(']');
            this.value(name, 64)
        };
        match code[..] {
            ["ld", "param", _] => {
                let name = operands[1].trim_start_matches('[').trim_end_matches(']');
                let at = self.kernel.parameters.iter().position(|one| one == name);
                self.set(operands[0], bits, self.arguments[at.expect("a parameter")]);
            }
            ["ld", "global", "v4", _] => {
                let from = address(self, 1);
                memory.at(from, 16);
                let parts = operands[0]
                    .trim_matches(['{', '}'])
                    .split(',')
                    .map(str::trim);
                for (word, name) in parts.enumerate() {
                    let value = memory.load(from + 4 * word as u64, 4);
                    self.set(name, 32, value);
                }
            }
            ["st", "global", "v4", _] => {
                let to = address(self, 0);
                memory.at(to, 16);
                let parts = operands[1]
                    .trim_matches(['{', '}'])
                    .split(',')
                    .map(str::trim);
                for (word, name) in parts.enumerate() {
                    memory.store(to + 4 * word as u64, 4, self.value(name, 32));
                }
            }
            ["ld", "global", _] => {
                let value = memory.load(address(self, 1), bits as usize / 8);
                // A register may be wider than the loaded value, which is extended with zeros.
                let width = self.kernel.widths[operands[0]];
                self.set(operands[0], width.max(bits), value);
            }
            ["st", "global", _] => {
                let width = self.kernel.widths[operands[1]];
                let value = self.value(operands[1], width.max(bits));
                memory.store(address(self, 0), bits as usize / 8, cut(value, bits));
            }
            ["cvta", "to", "global", "u64"] | ["mov", _] => {
                let value = read(self, 1);
                self.set(operands[0], bits, value);
            }
            ["cvt", "u64", "u32"] => {
                let value = read(self, 1);
                self.set(operands[0], 64, value);
            }
            ["cvt", "f32", "f16"] => {
                let half = f16::from_bits(read(self, 1) as u16);
                self.set(operands[0], 32, half.to_f32().to_bits().into());
            }
            ["cvt", "rn", "f16", "f32"] => {
                let half = f16::from_f32(float(read(self, 1)));
                self.set(operands[0], 16, half.to_bits().into());
            }
            ["setp", "nan", "f32"] => {
                let is = float(read(self, 1)).is_nan() || float(read(self, 2)).is_nan();
                self.set(operands[0], 1, is.into());
            }
            ["setp", comparison, kind] => {
                let (a, b) = (read(self, 1), read(self, 2));
                let order = match kind {
                    "s32" => signed(a).cmp(&signed(b)),
                    "u32" | "u64" => a.cmp(&b),
                    _ => panic!("{code:?}"),
                };
                let is = match comparison {
                    "eq" => order.is_eq(),
                    "lt" => order.is_lt(),
                    "ge" => order.is_ge(),
                    _ => panic!("{code:?}"),
                };
                self.set(operands[0], 1, is.into());
            }
            ["selp", "b32"] => {
                let chosen = 2 - self.value(operands[3], 1) as usize;
                let value = read(self, chosen);
                self.set(operands[0], 32, value);
            }
            ["popc", "b32"] => {
                let value = read(self, 1).count_ones();
                self.set(operands[0], 32, value.into());
            }
            ["mul", "wide", "u32"] => {
                let value = read(self, 1) * read(self, 2);
                self.set(operands[0], 64, value);
            }
            ["mad", "lo", _] => {
                let product = read(self, 1).wrapping_mul(read(self, 2));
                let value = product.wrapping_add(read(self, 3));
                self.set(operands[0], bits, value);
            }
            // The second operand of a shift has 32 bits, whatever the width of the first.
            ["shl", _] => {
                let by = self.value(operands[2], 32);
                self.set(operands[0], bits, read(self, 1) << by);
            }
            ["shr", "u32"] => {
                let by = self.value(operands[2], 32);
                self.set(operands[0], bits, read(self, 1) >> by);
            }
            ["fma", "rn", "f32"] => {
                let (a, b, c) = (read(self, 1), read(self, 2), read(self, 3));
                let value = float(a).mul_add(float(b), float(c));
                self.set(operands[0], 32, value.to_bits().into());
            }
            [operation, .., _] => {
                let (a, b) = (read(self, 1), read(self, 2));
                let value = match (operation, code.len()) {
                    ("add", 2) => a.wrapping_add(b),
                    ("mul", 3) if code[1] == "lo" => a.wrapping_mul(b),
                    ("div", 2) => a / b,
                    ("sub", 2) => a.wrapping_sub(b),
                    ("and", 2) => a & b,
                    ("or", 2) => a | b,
                    _ => panic!("no instruction of these kernels: {code:?}"),
                };
                self.set(operands[0], bits, value);
            }
            _ => panic!("no instruction: {code:?}"),
        }
    }
}
