//! Compares the kernels as they are launched with an interpreter of their PTX: on the emulator, the Rust functions in
//! their place must give the same bits; on a GPU, the GPU must.

use std::ffi::{CString, c_void};
use std::sync::Arc;

use nccl::World;
use nccl::cudarc::driver::{CudaContext, CudaStream, result, sys};

use super::Outcome;
use super::interpreter::{Grid, Kernel, Memory, PTX};
use crate::support::{self, ranks_as_threads};

/// An argument of a launch.
#[derive(Clone)]
enum Argument {
    Buffer(Vec<u8>),
    Wide(u64),
    Narrow(u32),
}

/// The device that runs the kernels besides the interpreter.
struct Device {
    stream: Arc<CudaStream>,
    module: sys::CUmodule,
}

impl Device {
    fn of(world: &World) -> Result<Self, Box<dyn std::error::Error>> {
        let context: Arc<CudaContext> = support::device(world)?;
        let text = CString::new(PTX)?;
        context.bind_to_thread()?;
        // SAFETY: a text that ends with a zero.
        let module = unsafe { result::module::load_data(text.as_ptr().cast()) }?;
        Ok(Self {
            stream: context.new_stream()?,
            module,
        })
    }

    /// Runs a kernel on both, and compares all buffers.
    fn compare(&self, name: &str, grid: Grid, arguments: &[Argument]) -> Outcome {
        let mut memory = Memory::default();
        let (mut theirs, mut ours, mut buffers) = (Vec::new(), Vec::new(), Vec::new());
        for argument in arguments {
            match argument {
                Argument::Buffer(bytes) => {
                    let address = memory.add(bytes.clone());
                    let buffer = self.stream.clone_htod(bytes)?;
                    theirs.push(address);
                    ours.push(buffer.leak());
                    buffers.push((address, ours[ours.len() - 1], bytes.len()));
                }
                Argument::Wide(number) => {
                    theirs.push(*number);
                    ours.push(*number);
                }
                Argument::Narrow(number) => {
                    theirs.push((*number).into());
                    ours.push((*number).into());
                }
            }
        }
        Kernel::of(name).run(grid, &theirs, &mut memory);
        // Little-endian: a narrow number is where its lower half is.
        let mut places: Vec<*mut c_void> = ours
            .iter()
            .map(|one| std::ptr::from_ref(one).cast_mut().cast())
            .collect();
        let ([x, y], threads) = (grid.blocks, grid.threads);
        // SAFETY: the arguments match the kernel's parameters; the interpreter has checked its accesses.
        unsafe {
            let function = result::module::get_function(self.module, CString::new(name)?)?;
            let stream = self.stream.cu_stream();
            result::launch_kernel(function, (x, y, 1), (threads, 1, 1), 0, stream, &mut places)?;
        }
        for (at, (address, device, len)) in buffers.into_iter().enumerate() {
            // SAFETY: leaked above, with that length.
            let buffer = unsafe { self.stream.upgrade_device_ptr::<u8>(device, len) };
            let found = self.stream.clone_dtoh(&buffer)?;
            let expected = memory.bytes(address);
            if let Some(byte) = (0..len).find(|&byte| found[byte] != expected[byte]) {
                let around = byte / 4 * 4..(byte / 4 * 4 + 4).min(len);
                panic!(
                    "{name}, buffer {at}, byte {byte}: {:x?}, the PTX says {:x?}",
                    &found[around.clone()],
                    &expected[around]
                );
            }
        }
        Ok(())
    }
}

fn bytes<const N: usize, T>(values: &[T], one: impl Fn(&T) -> [u8; N]) -> Argument {
    Argument::Buffer(values.iter().flat_map(one).collect())
}

fn numbers(values: &[i32]) -> Argument {
    bytes(values, |value| value.to_le_bytes())
}

/// Memory with arbitrary contents.
fn dirt(len: usize) -> Argument {
    Argument::Buffer((0..len).map(|at| at as u8 ^ 0xa5).collect())
}

#[test]
fn routing_is_what_the_ptx_says() {
    ranks_as_threads(1, |world: World| -> Outcome {
        let device = Device::of(&world)?;
        let mut random = fastrand::Rng::with_seed(7);
        for round in 0..60 {
            let experts = random.u32(1..9);
            let top_k = random.u32(1..=experts.min(4));
            let tokens = if round == 0 { 0 } else { random.u32(0..40) };
            let capacity = random.u32(1..80);
            let entries = (tokens * top_k) as usize;
            let topk: Vec<i32> = (0..entries)
                .map(|_| match random.u8(..) {
                    0..16 => -random.i32(1..),
                    16..32 => experts.cast_signed() + random.i32(0..1_000_000),
                    32..96 => 0,
                    _ => random.i32(0..experts.cast_signed()),
                })
                .collect();
            // Not empty, so that there is a buffer.
            let topk = numbers(&[&topk[..], &[0]].concat());
            let grid = Grid {
                blocks: [experts + 1, 1],
                threads: 32,
            };
            let arguments = [
                topk,
                dirt(4 * (entries + 1)),
                dirt((4 * experts * capacity) as usize + 4),
                dirt(4 * (experts as usize + 1)),
                Argument::Narrow(entries as u32),
                Argument::Narrow(top_k),
                Argument::Narrow(experts),
                Argument::Narrow(capacity),
                Argument::Narrow(random.u32(0..1000)),
            ];
            device.compare("nccl_expert_parallel_route", grid, &arguments)?;
        }
        Ok(())
    });
}

#[test]
fn copies_take_turns_as_the_ptx_says() {
    ranks_as_threads(1, |world: World| -> Outcome {
        let device = Device::of(&world)?;
        let mut random = fastrand::Rng::with_seed(10);
        for round in 0..60 {
            let experts = random.usize(1..9);
            let top_k = random.usize(1..4);
            let entries = if round == 0 {
                0
            } else {
                random.usize(0..300) * top_k
            };
            // Any numbers of copies, at any places.
            let mut table = vec![0];
            for _ in 0..experts {
                table.push(table.last().unwrap_or(&0) + random.i32(0..4));
            }
            let copies = table[experts];
            table.extend((0..copies).map(|_| random.i32(..)));
            let topk: Vec<i32> = (0..entries)
                .map(|_| match random.u8(..) {
                    0..16 => -random.i32(1..),
                    16..32 => experts as i32 + random.i32(0..1_000_000),
                    _ => random.i32(0..experts as i32),
                })
                .collect();
            let grid = Grid {
                blocks: [(entries as u32).div_ceil(256).max(1), 1],
                threads: 256,
            };
            let arguments = [
                // Not empty, so that there is a buffer.
                numbers(&[&topk[..], &[0]].concat()),
                numbers(&table),
                dirt(4 * (entries + 1)),
                Argument::Narrow(entries as u32),
                Argument::Narrow(top_k as u32),
                Argument::Narrow(experts as u32),
                Argument::Narrow(random.u32(0..1000)),
                // Beyond the end of the numbers, too.
                Argument::Narrow(random.u32(..)),
            ];
            device.compare("nccl_expert_parallel_place", grid, &arguments)?;
        }
        Ok(())
    });
}

#[test]
fn rows_are_copied_as_the_ptx_says() {
    ranks_as_threads(1, |world: World| -> Outcome {
        let device = Device::of(&world)?;
        let mut random = fastrand::Rng::with_seed(8);
        for word in [16usize, 4, 1] {
            for _ in 0..8 {
                let words = random.usize(0..300);
                let (rows, slots) = (random.usize(1..6), random.usize(1..9));
                let x: Vec<u8> = (0..rows * words * word + 16)
                    .map(|_| random.u8(..))
                    .collect();
                // Of an aborted exchange: any number.
                let token = |_| match random.u8(..) {
                    0..64 => random.i32(..),
                    _ => random.i32(-1..=rows as i32),
                };
                let tokens: Vec<i32> = (0..slots).map(token).collect();
                let grid = Grid {
                    blocks: [slots as u32, 1],
                    threads: 128,
                };
                let arguments = [
                    Argument::Buffer(x),
                    numbers(&tokens),
                    dirt(slots * words * word + 16),
                    Argument::Wide(words as u64),
                    Argument::Narrow(rows as u32),
                ];
                let name = format!("nccl_expert_parallel_permute_{word}");
                device.compare(&name, grid, &arguments)?;
            }
        }
        Ok(())
    });
}

/// The kernels that add rows, and the sizes of their elements.
const COMBINES: [(&str, usize); 3] = [("f32", 4), ("f16", 2), ("bf16", 2)];

#[test]
fn rows_are_added_up_as_the_ptx_says() {
    ranks_as_threads(1, |world: World| -> Outcome {
        let device = Device::of(&world)?;
        let mut random = fastrand::Rng::with_seed(9);
        for (kind, size) in COMBINES {
            for _ in 0..10 {
                let (tokens, top_k) = (random.usize(1..5), random.usize(1..6));
                let (rows, width) = (random.usize(1..7), random.usize(1..700));
                // Any bits: infinities, NaNs and subnormal numbers among them.
                let y: Vec<u8> = (0..rows * width * size).map(|_| random.u8(..)).collect();
                let slot = |_| match random.u8(..) {
                    0..30 => -1,
                    30..40 => -2,
                    _ => random.i32(0..rows as i32),
                };
                let slots: Vec<i32> = (0..tokens * top_k).map(slot).collect();
                let weights: Vec<f32> = (0..tokens * top_k)
                    .map(|_| match random.u8(..) {
                        0..8 => f32::from_bits(random.u32(..)),
                        _ => random.f32() * 3.0 - 1.0,
                    })
                    .collect();
                let parts = (width as u32).div_ceil(256).min(random.u32(1..4));
                let grid = Grid {
                    blocks: [tokens as u32, parts],
                    threads: 256,
                };
                let arguments = [
                    Argument::Buffer(y),
                    numbers(&slots),
                    bytes(&weights, |weight| weight.to_le_bytes()),
                    dirt(tokens * width * size),
                    Argument::Narrow(top_k as u32),
                    Argument::Wide(width as u64),
                ];
                let name = format!("nccl_expert_parallel_combine_{kind}");
                device.compare(&name, grid, &arguments)?;
            }
        }
        Ok(())
    });
}

/// One times each weight: of every exponent, with mantissas on both sides of each rounding boundary.
#[test]
fn sums_are_rounded_as_the_ptx_says() {
    ranks_as_threads(1, |world: World| -> Outcome {
        let device = Device::of(&world)?;
        let mantissas = [
            0, 1, 0xfff, 0x1000, 0x1001, 0x2fff, 0x3000, 0x3001, 0x7fff, 0x8000, 0x8001, 0x1_7fff,
            0x1_8000, 0x1_8001, 0x40_0000, 0x7f_7fff, 0x7f_8000, 0x7f_efff, 0x7f_f000, 0x7f_ffff,
        ];
        let mut weights = Vec::new();
        for head in 0..512u32 {
            weights.extend(mantissas.map(|mantissa| f32::from_bits(head << 23 | mantissa)));
        }
        let ones: [(&str, Vec<u8>); 3] = [
            ("f32", 1f32.to_le_bytes().to_vec()),
            ("f16", half::f16::ONE.to_le_bytes().to_vec()),
            ("bf16", half::bf16::ONE.to_le_bytes().to_vec()),
        ];
        for (kind, one) in ones {
            let size = one.len();
            let grid = Grid {
                blocks: [weights.len() as u32, 1],
                threads: 1,
            };
            let arguments = [
                Argument::Buffer(one),
                numbers(&vec![0; weights.len()]),
                bytes(&weights, |weight| weight.to_le_bytes()),
                dirt(weights.len() * size),
                Argument::Narrow(1),
                Argument::Wide(1),
            ];
            let name = format!("nccl_expert_parallel_combine_{kind}");
            device.compare(&name, grid, &arguments)?;
        }
        Ok(())
    });
}
