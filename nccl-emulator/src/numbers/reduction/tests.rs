//! Reductions of vectors of this process.

use nccl_sys::ncclRedOp_t;

use super::*;
use crate::numbers::datatype::{Reduction, Scalar};
use crate::numbers::float8::{E4M3, E5M2};

fn run<T: Copy + Default>(
    data_type: DataType,
    operator: Operator,
    inputs: &[Vec<T>],
) -> Vec<Vec<T>> {
    scaled(data_type, operator, inputs, &vec![0; inputs.len()])
}

/// As the built-in operator of that name.
fn average<T: Copy + Default>(data_type: DataType, inputs: &[Vec<T>]) -> Vec<T> {
    let ranks = inputs.len();
    let reduction = Reduction::built_in(ncclRedOp_t::ncclAvg, data_type, ranks as i32).unwrap();
    let Scalar::Value(scalar) = reduction.scalar else {
        panic!("it has its scalar");
    };
    scaled(data_type, reduction.operator, inputs, &vec![scalar; ranks]).swap_remove(0)
}

fn scaled<T: Copy + Default>(
    data_type: DataType,
    operator: Operator,
    inputs: &[Vec<T>],
    scalars: &[u64],
) -> Vec<Vec<T>> {
    let mut outputs: Vec<Vec<T>> = inputs
        .iter()
        .map(|input| vec![T::default(); input.len()])
        .collect();
    let from: Vec<*const u8> = inputs.iter().map(|input| input.as_ptr().cast()).collect();
    let to: Vec<*mut u8> = outputs
        .iter_mut()
        .map(|output| output.as_mut_ptr().cast())
        .collect();
    // SAFETY: all vectors have the same length.
    unsafe { reduce(data_type, operator, &from, scalars, &to, inputs[0].len()) };
    outputs
}

#[test]
fn every_operator_on_every_type_over_an_odd_count() {
    macro_rules! check {
        ($($variant:ident $element:ty),*) => {$({
            // Longer than a piece, and no multiple of anything.
            let value = |rank: usize, i: usize| ((i * 7 + rank * 3) % 5 + 1) as f64;
            let inputs: Vec<Vec<$element>> = (0..3)
                .map(|rank| (0..5003).map(|i| make::<$element>(value(rank, i))).collect())
                .collect();
            for operator in [Operator::Sum, Operator::Prod, Operator::Max, Operator::Min] {
                let outputs = run(DataType::$variant, operator, &inputs);
                for output in &outputs {
                    for (i, got) in output.iter().enumerate() {
                        let values = (0..3).map(|rank| value(rank, i));
                        let want = match operator {
                            Operator::Sum => values.sum::<f64>(),
                            Operator::Prod => values.product::<f64>(),
                            Operator::Max => values.fold(f64::MIN, f64::max),
                            _ => values.fold(f64::MAX, f64::min),
                        };
                        assert_eq!(*got, make::<$element>(want), "{operator:?} at {i}");
                    }
                }
            }
        })*};
    }
    trait Make {
        fn make(value: f64) -> Self;
    }
    macro_rules! makes { ($($t:ty),*) => {$(impl Make for $t { fn make(v: f64) -> Self { v as $t } })*} }
    makes!(i8, u8, i32, u32, i64, u64, f32, f64);
    impl Make for f16 {
        fn make(v: f64) -> Self {
            Self::from_f64(v)
        }
    }
    impl Make for bf16 {
        fn make(v: f64) -> Self {
            Self::from_f64(v)
        }
    }
    impl<const M: u32> Make for Float8<M> {
        fn make(v: f64) -> Self {
            Self::from_f32(v as f32)
        }
    }
    fn make<T: Make>(value: f64) -> T {
        T::make(value)
    }
    check!(
        I8 i8, U8 u8, I32 i32, U32 u32, I64 i64, U64 u64, F16 f16, F32 f32, F64 f64, Bf16 bf16,
        F8E4M3 E4M3, F8E5M2 E5M2
    );
}

#[test]
fn averages_wrap_divide_and_round_as_on_a_gpu() {
    assert_eq!(
        average(DataType::I8, &[vec![100i8, -5], vec![100, -2]]),
        [-28, -3]
    );
    assert_eq!(average(DataType::U8, &[vec![200u8], vec![100]]), [22]);
    // More ranks than the type can count to.
    let mut many = vec![vec![0i8]; 128];
    many[0] = vec![-128];
    assert_eq!(average(DataType::I8, &many), [-1]);
    assert_eq!(average(DataType::U8, &vec![vec![1u8]; 300]), [0]);
    let third = bf16::from_f32(1.0 / 3.0);
    let one = vec![bf16::ONE];
    let got = average(DataType::Bf16, &[one.clone(), one.clone(), one])[0];
    let two = bf16::from_f32(third.to_f32() + third.to_f32());
    assert_eq!(got, bf16::from_f32(two.to_f32() + third.to_f32()));
    assert_eq!(
        average(DataType::F64, &vec![vec![1.0f64]; 3]),
        [1.0 / 3.0 + 1.0 / 3.0 + 1.0 / 3.0]
    );
}

#[test]
fn eight_bit_floats_round_after_every_step_and_saturate() {
    let values = |numbers: &[f32]| numbers.iter().map(|&x| vec![E4M3::from_f32(x)]).collect();
    let sum = |numbers: &[f32]| {
        let inputs: Vec<Vec<E4M3>> = values(numbers);
        run(DataType::F8E4M3, Operator::Sum, &inputs)[0][0].to_f32()
    };
    // 16 + 1 is a tie that goes down, twice; 1 + 1 + 16 is exact.
    assert_eq!(
        (sum(&[16.0, 1.0, 1.0]), sum(&[1.0, 1.0, 16.0])),
        (16.0, 18.0)
    );
    // Saturated in the middle, and back.
    assert_eq!(sum(&[448.0, 448.0, -448.0]), 0.0);
    assert!(sum(&[1.0, f32::NAN]).is_nan());
    // A third is 0.34375 in this format, and so is three times that, rounded, not 1.
    let ones: Vec<Vec<E4M3>> = values(&[1.0; 3]);
    let third = E4M3::from_f32(1.0 / 3.0);
    assert_eq!(third.to_f32(), 0.34375);
    assert_eq!(
        average(DataType::F8E4M3, &ones)[0],
        third.add(third).add(third)
    );
    let largest = vec![vec![E5M2::from_f32(57344.0)]; 4];
    assert_eq!(average(DataType::F8E5M2, &largest)[0].to_f32(), 57344.0);
    let extreme = |operator| {
        let inputs = [
            vec![Float8::<2>(0x7c)],
            vec![Float8::<2>(0x7f)],
            vec![Float8::<2>(0xbc)],
        ];
        run(DataType::F8E5M2, operator, &inputs)[0][0].to_f32()
    };
    assert_eq!(
        (extreme(Operator::Max), extreme(Operator::Min)),
        (57344.0, -1.0)
    );
}

#[test]
fn every_rank_has_a_factor_of_its_own() {
    let bits = |values: [f32; 2]| values.map(|value| u64::from(value.to_bits()));
    let inputs = [vec![1.0f32, 2.0], vec![10.0, 20.0]];
    let got = scaled(
        DataType::F32,
        Operator::PreMulSum,
        &inputs,
        &bits([3.0, 0.5]),
    );
    assert_eq!(got[1], [8.0, 16.0]);
    // Integers wrap.
    let got = scaled(
        DataType::I8,
        Operator::PreMulSum,
        &[vec![100i8], vec![1]],
        &[3, 0xff],
    );
    assert_eq!(got[0], [43]);
}

#[test]
fn extremes_ignore_nan() {
    assert_eq!(
        run(DataType::F32, Operator::Max, &[vec![f32::NAN], vec![1.0]])[0],
        [1.0]
    );
    assert_eq!(
        run(
            DataType::F16,
            Operator::Min,
            &[vec![f16::ONE], vec![f16::NAN]]
        )[0],
        [f16::ONE]
    );
    // Of two zeros the positive one is the larger.
    let zeros = [vec![-0.0f32, 0.0], vec![0.0, -0.0]];
    let signs = |operator| {
        run(DataType::F32, operator, &zeros)[0]
            .iter()
            .map(|x| x.is_sign_negative())
            .collect::<Vec<_>>()
    };
    assert_eq!(signs(Operator::Max), [false, false]);
    assert_eq!(signs(Operator::Min), [true, true]);
}

#[test]
fn an_input_may_be_its_own_output() {
    let mut a = vec![1u32; 3000];
    let mut b = vec![2u32; 3000];
    let to = [a.as_mut_ptr().cast::<u8>(), b.as_mut_ptr().cast()];
    let from = [to[0].cast_const(), to[1].cast_const()];
    // SAFETY: both have 3000 elements.
    unsafe { reduce(DataType::U32, Operator::Sum, &from, &[0; 2], &to, 3000) };
    assert!(a.iter().chain(&b).all(|&x| x == 3));
}
