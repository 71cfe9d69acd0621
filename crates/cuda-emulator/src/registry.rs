//! Handles: the values of `CUstream`, `CUevent` or `CUcontext` that callers get.
//!
//! A handle is no pointer but a number that identifies a slot: kind, generation, slot. So the registry
//! recognises a destroyed or invented handle without a memory access; and since the kind is in the top
//! byte, no handle is a valid address. The top bit is not set, nor is it in an address of CUDA: some
//! clients, CuPy among them, keep handles in signed integers.
//!
//! Slots live in chunks that are never moved or freed; each slot has its own lock, held only to
//! clone an `Arc`.

use std::ffi::c_void;
use std::sync::{Arc, OnceLock};

use crate::sync::Mutex;

/// The slots of the first chunk. Each further chunk has twice as many as the previous one.
const FIRST: usize = 64;
/// 64 · (2^20 − 1) slots: more handles than memory could hold.
const CHUNKS: usize = 20;

/// The objects of one kind with handles.
pub struct Registry<T> {
    kind: u8,
    chunks: [OnceLock<Chunk<T>>; CHUNKS],
    free: Mutex<Free>,
}

type Chunk<T> = Box<[Mutex<Slot<T>>]>;

struct Slot<T> {
    generation: u32,
    object: Option<Arc<T>>,
}

struct Free {
    slots: Vec<u32>,
    /// The number of slots that were ever in use.
    used: u32,
}

impl<T> Registry<T> {
    /// Creates an empty registry. `kind` (1 to 127) distinguishes its handles from those of other
    /// registries.
    pub const fn new(kind: u8) -> Self {
        assert!(
            matches!(kind, 1..=127),
            "the top bit of a handle is not set"
        );
        Self {
            kind,
            chunks: [const { OnceLock::new() }; CHUNKS],
            free: Mutex::new(Free {
                slots: Vec::new(),
                used: 0,
            }),
        }
    }

    /// Gives an object a handle. Returns `None` if all handles are taken.
    pub fn insert(&self, object: Arc<T>) -> Option<*mut c_void> {
        let index = {
            let mut free = self.free.lock();
            match free.slots.pop() {
                Some(index) => index,
                None => {
                    let index = free.used;
                    free.used = index.checked_add(1)?;
                    index
                }
            }
        };
        let mut slot = self.slot(index, true)?.lock();
        slot.generation = (slot.generation + 1) & 0xff_ffff;
        slot.object = Some(object);
        Some(self.encode(index, slot.generation))
    }

    /// Returns the object of a live handle.
    pub fn get(&self, handle: *mut c_void) -> Option<Arc<T>> {
        let (index, generation) = self.decode(handle)?;
        let slot = self.slot(index, false)?.lock();
        if slot.generation == generation {
            slot.object.clone()
        } else {
            None
        }
    }

    /// Ends a handle and returns its object.
    pub fn remove(&self, handle: *mut c_void) -> Option<Arc<T>> {
        let (index, generation) = self.decode(handle)?;
        let mut slot = self.slot(index, false)?.lock();
        if slot.generation != generation {
            return None;
        }
        let object = slot.object.take()?;
        drop(slot);
        self.free.lock().slots.push(index);
        Some(object)
    }

    /// Ends the handles of all objects for which `unwanted` returns true.
    pub fn remove_if(&self, unwanted: impl Fn(&T) -> bool) {
        let used = self.free.lock().used;
        for index in 0..used {
            let Some(slot) = self.slot(index, false) else {
                continue;
            };
            let mut slot = slot.lock();
            if slot.object.as_deref().is_some_and(&unwanted) {
                let object = slot.object.take();
                drop(slot);
                self.free.lock().slots.push(index);
                drop(object);
            }
        }
    }

    fn slot(&self, index: u32, grow: bool) -> Option<&Mutex<Slot<T>>> {
        let position = index as usize / FIRST + 1;
        let chunk = position.ilog2() as usize;
        let offset = index as usize - FIRST * ((1 << chunk) - 1);
        let cell = self.chunks.get(chunk)?;
        let slots = if grow {
            cell.get_or_init(|| {
                (0..FIRST << chunk)
                    .map(|_| {
                        Mutex::new(Slot {
                            generation: 0,
                            object: None,
                        })
                    })
                    .collect()
            })
        } else {
            cell.get()?
        };
        slots.get(offset)
    }

    fn encode(&self, index: u32, generation: u32) -> *mut c_void {
        let bits = u64::from(self.kind) << 56 | u64::from(generation) << 32 | u64::from(index) << 4;
        std::ptr::without_provenance_mut(bits as usize)
    }

    fn decode(&self, handle: *mut c_void) -> Option<(u32, u32)> {
        let bits = handle.addr() as u64;
        if bits >> 56 != u64::from(self.kind) || bits & 0xf != 0 {
            return None;
        }
        Some(((bits as u32) >> 4, (bits >> 32) as u32 & 0xff_ffff))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_destroyed_handle_is_not_found_even_when_its_slot_is_reused() {
        let registry = Registry::new(7);
        let first = registry.insert(Arc::new(1)).unwrap();
        assert_eq!(registry.get(first).as_deref(), Some(&1));
        assert_eq!(registry.remove(first).as_deref(), Some(&1));
        let second = registry.insert(Arc::new(2)).unwrap();
        assert_ne!(first, second);
        assert_eq!(registry.get(first), None);
        assert_eq!(registry.remove(first), None);
        assert_eq!(registry.get(second).as_deref(), Some(&2));
    }

    #[test]
    fn made_up_handles_are_not_found() {
        let registry = Registry::<i32>::new(7);
        let live = registry.insert(Arc::new(1)).unwrap();
        let other = Registry::<i32>::new(8);
        for handle in [
            std::ptr::null_mut(),
            std::ptr::without_provenance_mut(1),
            std::ptr::without_provenance_mut(live.addr() + 16),
            std::ptr::without_provenance_mut(live.addr() + 1),
            std::ptr::without_provenance_mut(usize::MAX),
        ] {
            assert_eq!(registry.get(handle), None);
        }
        assert_eq!(other.get(live), None);
    }

    #[test]
    fn a_thousand_objects_keep_their_handles_apart() {
        let registry = Registry::new(9);
        let handles: Vec<_> = (0..1000)
            .map(|i| registry.insert(Arc::new(i)).unwrap())
            .collect();
        for (i, &handle) in handles.iter().enumerate() {
            assert_eq!(registry.get(handle).as_deref(), Some(&i));
        }
    }
}
