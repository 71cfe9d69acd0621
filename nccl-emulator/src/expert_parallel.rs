//! The kernels of `nccl::moe::ExpertParallel`: the same results, to the bit, as the PTX in
//! `crates/nccl-moe/src/expert_parallel/kernels.ptx`.

use half::{bf16, f16};

use cuda_emulator::kernels::{self, Launch};
use cuda_emulator::violations::Violation;

/// The slot of an entry without a slot: the entry names no expert on purpose, or the expert is full or does not exist.
const MASKED: i32 = -1;
const LOST: i32 = -2;

/// Registers the kernels with the driver.
pub(crate) fn provide() {
    kernels::provide("nccl_expert_parallel_place", place);
    kernels::provide("nccl_expert_parallel_route", route);
    kernels::provide("nccl_expert_parallel_permute_16", permute::<16>);
    kernels::provide("nccl_expert_parallel_permute_4", permute::<4>);
    kernels::provide("nccl_expert_parallel_permute_1", permute::<1>);
    kernels::provide("nccl_expert_parallel_combine_f32", combine::<f32>);
    kernels::provide("nccl_expert_parallel_combine_f16", combine::<F16>);
    kernels::provide("nccl_expert_parallel_combine_bf16", combine::<Bf16>);
}

/// Assigns each entry the place of one of the copies of its expert.
fn place(launch: &mut Launch<'_>) -> Result<(), Violation> {
    let pointer = |index| launch.argument::<u64>(index);
    let (topk, table_at, placed) = (pointer(0), pointer(1), pointer(2));
    let number = |index| launch.argument::<u32>(index);
    let (entries, top_k, experts) = (number(3), number(4), number(5));
    let (places, turn) = (number(6), number(7));
    let threads = launch.grid()[0] * launch.block()[0];
    assert!(
        entries <= threads,
        "{entries} entries and {threads} threads"
    );
    if entries == 0 {
        return Ok(());
    }
    let wanted: Vec<i32> = launch.read(topk, entries as usize)?;
    let firsts: Vec<i32> = launch.read(table_at, experts as usize + 1)?;
    let all = firsts[experts as usize].cast_unsigned();
    let table: Vec<i32> = launch.read(table_at + 4 * (u64::from(experts) + 1), all as usize)?;
    let of = |(entry, &expert): (u32, &i32)| {
        let bounds = match usize::try_from(expert) {
            Err(_) => return expert,
            Ok(expert) => firsts.get(expert..expert + 2),
        };
        match bounds {
            Some(&[first, end]) if first < end => {
                let count = (end - first).cast_unsigned();
                let turn = turn.wrapping_add(entry / top_k) % count;
                table[first as usize + turn as usize]
            }
            _ => places.cast_signed(),
        }
    };
    let chosen: Vec<i32> = (0..).zip(&wanted).map(of).collect();
    launch.write(placed, &chosen)
}

/// Assigns each entry its slot, in the order of the entries.
fn route(launch: &mut Launch<'_>) -> Result<(), Violation> {
    let pointer = |index| launch.argument::<u64>(index);
    let (topk, slots_at, tokens_at, counts_at) = (pointer(0), pointer(1), pointer(2), pointer(3));
    let number = |index| launch.argument::<u32>(index);
    let (entries, top_k, experts, capacity) = (number(4), number(5), number(6), number(7));
    let first = number(8);
    assert_eq!(launch.grid(), [experts + 1, 1, 1]);
    assert_eq!(launch.block(), [32, 1, 1]);
    let wanted: Vec<i32> = launch.read(topk, entries as usize)?;
    let mut slots = vec![MASKED; entries as usize];
    let mut tokens = vec![-1i32; experts as usize * capacity as usize];
    let mut counts = vec![0u32; experts as usize + 1];
    for (entry, (&expert, slot)) in wanted.iter().zip(&mut slots).enumerate() {
        if expert < 0 {
            continue;
        }
        let count = &mut counts[expert.cast_unsigned().min(experts) as usize];
        let place = *count;
        *count += 1;
        *slot = if expert.cast_unsigned() < experts && place < capacity {
            let slot = expert.cast_unsigned() * capacity + place;
            tokens[slot as usize] = (first + entry as u32 / top_k).cast_signed();
            slot.cast_signed()
        } else {
            LOST
        };
    }
    launch.write(slots_at, &slots)?;
    launch.write(tokens_at, &tokens)?;
    launch.write(counts_at, &counts)
}

/// Copies the row of its token into each slot, and zeros into slots without one.
fn permute<const WORD: usize>(launch: &mut Launch<'_>) -> Result<(), Violation> {
    let pointer = |index| launch.argument::<u64>(index);
    let (x, tokens_at, y, words) = (pointer(0), pointer(1), pointer(2), pointer(3));
    let rows = launch.argument::<u32>(4);
    // On a GPU, loads and stores of a word fail for any other alignment.
    if WORD == 16 {
        assert!((x | y).is_multiple_of(16), "misaligned rows");
    }
    let bytes = words as usize * WORD;
    let slots = launch.grid()[0] as usize;
    let tokens: Vec<i32> = launch.read(tokens_at, slots)?;
    let zeros = vec![0u8; bytes];
    for (slot, &token) in tokens.iter().enumerate() {
        let to = y + (slot * bytes) as u64;
        if token.cast_unsigned() >= rows {
            launch.write(to, &zeros)?;
        } else {
            launch.copy(to, x + (token as usize * bytes) as u64, bytes)?;
        }
    }
    Ok(())
}

/// An element type that is weighted and summed as `f32`.
trait Weighed {
    type Bits: kernels::Plain;

    fn widened(bits: Self::Bits) -> f32;

    /// Rounds to nearest, ties to even. All NaN sums give the same bits.
    fn rounded(sum: f32) -> Self::Bits;
}

impl Weighed for f32 {
    type Bits = f32;

    fn widened(bits: f32) -> f32 {
        bits
    }

    fn rounded(sum: f32) -> f32 {
        if sum.is_nan() {
            f32::from_bits(0x7fff_ffff)
        } else {
            sum
        }
    }
}

struct F16;

impl Weighed for F16 {
    type Bits = u16;

    fn widened(bits: u16) -> f32 {
        f16::from_bits(bits).to_f32()
    }

    fn rounded(sum: f32) -> u16 {
        if sum.is_nan() {
            0x7fff
        } else {
            f16::from_f32(sum).to_bits()
        }
    }
}

struct Bf16;

impl Weighed for Bf16 {
    type Bits = u16;

    fn widened(bits: u16) -> f32 {
        bf16::from_bits(bits).to_f32()
    }

    fn rounded(sum: f32) -> u16 {
        if sum.is_nan() {
            0x7fff
        } else {
            bf16::from_f32(sum).to_bits()
        }
    }
}

/// Sums the results of the experts for each token, in the order of its entries. Each product and its addition are rounded
/// together, once.
fn combine<T: Weighed>(launch: &mut Launch<'_>) -> Result<(), Violation> {
    let pointer = |index| launch.argument::<u64>(index);
    let (y, slots_at, weights_at, out) = (pointer(0), pointer(1), pointer(2), pointer(3));
    let (top_k, width) = (
        launch.argument::<u32>(4) as usize,
        launch.argument::<u64>(5) as usize,
    );
    let [tokens, ..] = launch.grid();
    let entries = tokens as usize * top_k;
    let slots: Vec<i32> = launch.read(slots_at, entries)?;
    let weights: Vec<f32> = launch.read(weights_at, entries)?;
    let row_bytes = (width * size_of::<T::Bits>()) as u64;
    let mut sums = vec![0f32; width];
    for token in 0..tokens as usize {
        sums.fill(0.0);
        for entry in token * top_k..(token + 1) * top_k {
            match slots[entry] {
                MASKED => {}
                slot if slot < 0 => sums.fill(f32::NAN),
                slot => {
                    let row: Vec<T::Bits> = launch.read(y + slot as u64 * row_bytes, width)?;
                    for (sum, bits) in sums.iter_mut().zip(row) {
                        *sum = weights[entry].mul_add(T::widened(bits), *sum);
                    }
                }
            }
        }
        let rounded: Vec<T::Bits> = sums.iter().map(|&sum| T::rounded(sum)).collect();
        launch.write(out + token as u64 * row_bytes, &rounded)?;
    }
    Ok(())
}
