//! A shared object without code: an ELF file in memory whose symbols are addresses of this process.
//!
//! The dynamic linker needs little of a library to answer `dlopen` by name and `dlsym`: a dynamic
//! section with a SONAME, a symbol table, a string table and a hash table. The symbols are absolute
//! (`SHN_ABS`), so their values are taken as they are.

use std::ffi::{CStr, c_void};

/// One name and what it stands for.
pub type Symbol = (&'static CStr, *const c_void);

const EHDR: usize = 64;
const PHDR: usize = 56;
const SYM: usize = 24;
const DYN: usize = 16;

const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const PT_GNU_STACK: u32 = 0x6474_e551;
const R: u32 = 4;
const W: u32 = 2;

#[cfg(target_arch = "x86_64")]
const MACHINE: u16 = 62;
#[cfg(target_arch = "aarch64")]
const MACHINE: u16 = 183;

/// The bytes of a shared object named `soname`.
pub fn shared_object(soname: &CStr, symbols: &[Symbol]) -> Vec<u8> {
    let mut strings = vec![0];
    let mut string = |text: &CStr| {
        let at = strings.len() as u32;
        strings.extend_from_slice(text.to_bytes_with_nul());
        at
    };
    let soname_at = string(soname);
    let names: Vec<u32> = symbols.iter().map(|(name, _)| string(name)).collect();

    let count = symbols.len() + 1;
    let buckets = (count / 2).max(1);
    let symtab = EHDR + 3 * PHDR;
    let hash = symtab + count * SYM;
    let dynamic = (hash + 4 * (2 + buckets + count)).next_multiple_of(8);
    let strtab = dynamic + 7 * DYN;
    let end = strtab + strings.len();

    let mut out = Vec::with_capacity(end);
    // The file header: 64 bits, this machine's order, ET_DYN.
    let order = if cfg!(target_endian = "little") { 1 } else { 2 };
    out.extend_from_slice(&[
        0x7f, b'E', b'L', b'F', 2, order, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0,
    ]);
    put16(&mut out, &[3, MACHINE]);
    put32(&mut out, &[1]);
    put64(&mut out, &[0, EHDR as u64, 0]);
    put32(&mut out, &[0]);
    put16(&mut out, &[EHDR as u16, PHDR as u16, 3, 0, 0, 0]);

    // Writable, because the dynamic linker relocates the dynamic section in place. Without
    // PT_GNU_STACK it would make every stack of the process executable.
    let mut segment = |kind: u32, flags: u32, at: usize, len: usize, align: u64| {
        put32(&mut out, &[kind, flags]);
        put64(
            &mut out,
            &[
                at as u64, at as u64, at as u64, len as u64, len as u64, align,
            ],
        );
    };
    segment(PT_LOAD, R | W, 0, end, 0x1_0000);
    segment(PT_DYNAMIC, R | W, dynamic, 7 * DYN, 8);
    segment(PT_GNU_STACK, R | W, 0, 0, 16);

    out.resize(symtab + SYM, 0);
    for ((_, address), name) in symbols.iter().zip(&names) {
        put32(&mut out, &[*name]);
        // Global function, default visibility, absolute.
        out.extend_from_slice(&[1 << 4 | 2, 0]);
        put16(&mut out, &[0xfff1]);
        put64(&mut out, &[address.expose_provenance() as u64, 16]);
    }

    let mut heads = vec![0_u32; buckets];
    let mut chains = vec![0_u32; count];
    for (index, (name, _)) in symbols.iter().enumerate() {
        let bucket = sysv_hash(name) as usize % buckets;
        chains[index + 1] = heads[bucket];
        heads[bucket] = index as u32 + 1;
    }
    put32(&mut out, &[buckets as u32, count as u32]);
    put32(&mut out, &heads);
    put32(&mut out, &chains);

    out.resize(dynamic, 0);
    for (tag, value) in [
        (14, soname_at as usize), // DT_SONAME
        (4, hash),                // DT_HASH
        (6, symtab),              // DT_SYMTAB
        (11, SYM),                // DT_SYMENT
        (5, strtab),              // DT_STRTAB
        (10, strings.len()),      // DT_STRSZ
        (0, 0),
    ] {
        put64(&mut out, &[tag, value as u64]);
    }
    out.extend_from_slice(&strings);
    out
}

fn put16(out: &mut Vec<u8>, values: &[u16]) {
    values
        .iter()
        .for_each(|value| out.extend_from_slice(&value.to_ne_bytes()));
}

fn put32(out: &mut Vec<u8>, values: &[u32]) {
    values
        .iter()
        .for_each(|value| out.extend_from_slice(&value.to_ne_bytes()));
}

fn put64(out: &mut Vec<u8>, values: &[u64]) {
    values
        .iter()
        .for_each(|value| out.extend_from_slice(&value.to_ne_bytes()));
}

fn sysv_hash(name: &CStr) -> u32 {
    name.to_bytes().iter().fold(0_u32, |hash, &byte| {
        let hash = (hash << 4).wrapping_add(u32::from(byte));
        let top = hash & 0xf000_0000;
        (hash ^ top >> 24) & !top
    })
}

/// Where the symbol table begins in a loaded object, and how large an entry is: for
/// [`crate::install`], which corrects the values on a dynamic linker that adds the load address to
/// absolute symbols.
pub(crate) const VALUES: (usize, usize) = (EHDR + 3 * PHDR + SYM + 8, SYM);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_the_one_of_the_gabi() {
        // Example values of the System V ABI's function.
        assert_eq!(sysv_hash(c""), 0);
        assert_eq!(sysv_hash(c"printf"), 0x077905a6);
        assert_eq!(sysv_hash(c"exit"), 0x0006cf04);
        assert_eq!(sysv_hash(c"syscall"), 0x0b09985c);
    }

    #[test]
    fn the_parts_lie_where_the_headers_say() {
        let symbols: Vec<Symbol> = vec![
            (c"one", std::ptr::without_provenance(0x1234)),
            (c"two", std::ptr::without_provenance(0x5678)),
        ];
        let object = shared_object(c"libx.so", &symbols);
        let word = |at: usize| u64::from_ne_bytes(object[at..at + 8].try_into().unwrap());
        assert_eq!(&object[..4], b"\x7fELF");
        assert_eq!(
            word(EHDR + 32),
            object.len() as u64,
            "PT_LOAD covers the file"
        );
        let (values, step) = VALUES;
        assert_eq!(word(values), 0x1234);
        assert_eq!(word(values + step), 0x5678);
    }
}
