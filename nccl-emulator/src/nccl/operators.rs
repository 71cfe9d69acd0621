//! The operators that users create for a communicator: `ncclRedOpCreatePreMulSum`.
//!
//! Operators belong to their communicator and end with it. A handle is the number of a slot, scrambled with the communicator's
//! handle, so that other communicators most likely do not know it. Issuing a collective copies the contents of the slot, so the
//! operator may be destroyed right after.

use nccl_sys::{ncclDataType_t, ncclRedOp_t};

use crate::numbers::datatype::Scalar;

const BUILT_IN: u32 = ncclRedOp_t::ncclNumOps.0;
const LARGEST: u32 = ncclRedOp_t::ncclMaxRedOp.0;

/// An operator that multiplies and adds.
#[derive(Debug, Clone, Copy)]
pub(crate) struct UserOperator {
    /// The data type, unchecked: NCCL checks it only when the operator is used.
    pub(crate) data_type: ncclDataType_t,
    pub(crate) scalar: Scalar,
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct UserOperators {
    slots: Vec<Option<UserOperator>>,
    /// Free slots; the last one is reused first.
    free: Vec<usize>,
}

/// Maps a slot's number, counted from the built-in operators, to a handle, and back.
fn scramble(communicator: usize, op: u32) -> u32 {
    let mut hash = communicator as u64;
    hash ^= hash >> 32;
    hash = hash.wrapping_mul(0x9e37_79b9_7f4a_7c13) >> 32;
    let scrambled = (hash as u32 & LARGEST) ^ op;
    // Built-in numbers keep their meaning, so numbers that would be scrambled to a built-in one are not scrambled.
    if scrambled < BUILT_IN { op } else { scrambled }
}

impl UserOperators {
    /// Stores an operator and returns its handle.
    pub(crate) fn create(&mut self, communicator: usize, operator: UserOperator) -> ncclRedOp_t {
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.slots[slot] = Some(operator);
        ncclRedOp_t(scramble(communicator, BUILT_IN + slot as u32))
    }

    fn slot(&self, communicator: usize, op: ncclRedOp_t) -> usize {
        scramble(communicator, op.0).wrapping_sub(BUILT_IN) as usize
    }

    /// Returns the operator of a handle.
    pub(crate) fn get(&self, communicator: usize, op: ncclRedOp_t) -> Option<UserOperator> {
        *self.slots.get(self.slot(communicator, op))?
    }

    /// Removes an operator. Returns false if there is none.
    pub(crate) fn destroy(&mut self, communicator: usize, op: ncclRedOp_t) -> bool {
        let slot = self.slot(communicator, op);
        let known = self.slots.get_mut(slot).and_then(Option::take).is_some();
        if known {
            self.free.push(slot);
        }
        known
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_found_again_and_never_look_like_built_in_operators() {
        // Also tests slots whose scrambled number would be a built-in one.
        let hash_of_zero = 0;
        for communicator in [hash_of_zero, 0xcc00_0000_0000_0001, usize::MAX, 12345] {
            let mut operators = UserOperators::default();
            let handles: Vec<_> = (0..100)
                .map(|value| {
                    let operator = UserOperator {
                        data_type: ncclDataType_t::ncclFloat32,
                        scalar: Scalar::Value(value),
                    };
                    operators.create(communicator, operator)
                })
                .collect();
            for (value, &handle) in handles.iter().enumerate() {
                assert!((BUILT_IN..=LARGEST).contains(&handle.0));
                let operator = operators.get(communicator, handle).unwrap();
                assert_eq!(operator.scalar, Scalar::Value(value as u64));
            }
            assert!(operators.destroy(communicator, handles[7]));
            assert!(!operators.destroy(communicator, handles[7]));
            assert!(operators.get(communicator, handles[7]).is_none());
            let again = UserOperator {
                data_type: ncclDataType_t::ncclInt8,
                scalar: Scalar::At(0),
            };
            assert_eq!(operators.create(communicator, again), handles[7]);
        }
    }
}
