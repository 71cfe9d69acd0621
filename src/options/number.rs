//! Numbers and sizes as nccl-tests reads them, but complete: text that nccl-tests would cut off or replace by a default
//! is refused.

/// A whole number, in C's notations: decimal, `0x…` hexadecimal, `0…` octal.
pub(crate) fn integer(text: &str) -> Option<i64> {
    let (negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let (digits, radix) = if let Some(hex) = digits.strip_prefix("0x").or(digits.strip_prefix("0X"))
    {
        (hex, 16)
    } else if digits.len() > 1 && digits.starts_with('0') {
        (&digits[1..], 8)
    } else {
        (digits, 10)
    };
    // `from_str_radix` accepts a sign of its own.
    if !digits.starts_with(|c: char| c.is_ascii_hexdigit()) {
        return None;
    }
    let magnitude = i64::from_str_radix(digits, radix).ok()?;
    Some(if negative { -magnitude } else { magnitude })
}

/// A size in bytes: a number, fractions allowed, and `K`, `M` or `G` for powers of 1024.
///
/// # Errors
/// The reason, to be completed by the name of the option.
pub(crate) fn size(text: &str) -> Result<u64, &'static str> {
    const NOT_A_SIZE: &str = "is not a size such as 8, 1K, 1.5M or 2G";
    let (digits, unit) = match text.trim().char_indices().next_back() {
        Some((at, 'K' | 'k')) => (&text.trim()[..at], 1u64 << 10),
        Some((at, 'M' | 'm')) => (&text.trim()[..at], 1 << 20),
        Some((at, 'G' | 'g')) => (&text.trim()[..at], 1 << 30),
        Some(_) => (text.trim(), 1),
        None => return Err("is empty"),
    };
    let digits = digits.trim_end();
    // Rust would also read `inf` and `nan`.
    if !digits.contains(|c: char| c.is_ascii_digit()) {
        return Err(NOT_A_SIZE);
    }
    let number: f64 = digits.parse().map_err(|_| NOT_A_SIZE)?;
    if number.is_sign_negative() && number != 0.0 {
        return Err("is negative");
    }
    // Whole numbers are computed exactly: a double has 53 bits.
    let bytes = match digits.parse::<u64>() {
        Ok(whole) => whole.checked_mul(unit),
        Err(_) => {
            let bytes = number * unit as f64;
            (bytes < 2f64.powi(63)).then_some(bytes as u64)
        }
    };
    bytes
        .filter(|&bytes| bytes < 1 << 63)
        .ok_or("is more than any machine can address")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_binary_and_may_be_fractions() {
        for (text, bytes) in [
            ("8", 8),
            ("0", 0),
            ("1K", 1 << 10),
            ("1.5k", 1536),
            ("0.5M", 1 << 19),
            ("2G", 2 << 30),
            ("1e3", 1000),
            (" 4 M", 4 << 20),
            ("9007199254740993", 9_007_199_254_740_993),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
    }

    #[test]
    fn what_is_no_size_is_refused_with_a_reason() {
        for text in [
            "", "K", "abc", "1T", "1KB", "0x10", "nan", "inf", "1 2", "--5", "1,5M",
        ] {
            assert!(size(text).is_err(), "{text}");
        }
        assert_eq!(size("-1"), Err("is negative"));
        assert_eq!(size("1e30"), Err("is more than any machine can address"));
        assert_eq!(
            size("99999999999G"),
            Err("is more than any machine can address")
        );
        assert_eq!(
            size("18446744073709551616"),
            Err("is more than any machine can address")
        );
    }

    #[test]
    fn integers_are_read_as_c_reads_them() {
        for (text, value) in [
            ("20", 20),
            ("-1", -1),
            ("+3", 3),
            ("0x10", 16),
            ("010", 8),
            ("0", 0),
            ("-0x2", -2),
        ] {
            assert_eq!(integer(text), Some(value), "{text}");
        }
        for text in [
            "",
            "-",
            "1.5",
            "20x",
            "0x",
            "+-3",
            "99999999999999999999",
            "0x-1",
            "08",
        ] {
            assert_eq!(integer(text), None, "{text}");
        }
    }
}
