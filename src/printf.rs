//! Numbers as C's `printf` writes them.
//!
//! nccl-tests prints through `printf`, and scripts read its columns by position, so [`format`] and
//! [`json`] need the same characters: the same rounding, the same width, the same exponent. Rust and
//! glibc both round exactly, half to even; what differs is spelling.
//!
//! [`format`]: mod@crate::format
//! [`json`]: crate::json

/// The text that C prints instead of digits, if any.
fn special(value: f64) -> Option<&'static str> {
    if value.is_nan() {
        Some(if value.is_sign_negative() {
            "-nan"
        } else {
            "nan"
        })
    } else if value.is_infinite() {
        Some(if value < 0.0 { "-inf" } else { "inf" })
    } else {
        None
    }
}

/// `%.{precision}f`
///
/// ```
/// assert_eq!(nccl_tools::printf::fixed(0.125, 2), "0.12");
/// ```
#[must_use]
pub fn fixed(value: f64, precision: usize) -> String {
    match special(value) {
        Some(text) => text.to_owned(),
        None => format!("{value:.precision$}"),
    }
}

/// `%.{precision}e`: at least two digits of exponent, always with its sign.
///
/// ```
/// assert_eq!(nccl_tools::printf::exponent(12_345_678.0, 1), "1.2e+07");
/// ```
#[must_use]
pub fn exponent(value: f64, precision: usize) -> String {
    if let Some(text) = special(value) {
        return text.to_owned();
    }
    let text = format!("{value:.precision$e}");
    let (digits, power) = text.split_once('e').unwrap_or((&text, "0"));
    let (sign, power) = match power.strip_prefix('-') {
        Some(power) => ('-', power),
        None => ('+', power),
    };
    format!("{digits}e{sign}{power:0>2}")
}

/// `%g`: six significant digits, in whichever notation is shorter, without trailing zeros.
///
/// ```
/// assert_eq!(nccl_tools::printf::general(1_234_567.0), "1.23457e+06");
/// ```
#[must_use]
pub fn general(value: f64) -> String {
    const DIGITS: i32 = 6;
    if let Some(text) = special(value) {
        return text.to_owned();
    }
    let scientific = exponent(value, DIGITS as usize - 1);
    let (digits, power) = scientific.split_once('e').unwrap_or((&scientific, "+00"));
    let power: i32 = power.parse().unwrap_or(0);
    if (-4..DIGITS).contains(&power) {
        without_trailing_zeros(&fixed(value, (DIGITS - 1 - power) as usize)).to_owned()
    } else {
        let digits = without_trailing_zeros(digits);
        format!(
            "{digits}e{}",
            scientific.rsplit('e').next().unwrap_or_default()
        )
    }
}

fn without_trailing_zeros(digits: &str) -> &str {
    if digits.contains('.') {
        digits.trim_end_matches('0').trim_end_matches('.')
    } else {
        digits
    }
}

/// A number in a column `width` wide, with as many decimals as fit: two, one, none, and only then an exponent. Text
/// that is still too long is cut off, as in nccl-tests.
///
/// ```
/// use nccl_tools::printf::cell;
/// assert_eq!(cell(12.345, 7), "  12.35");
/// assert_eq!(cell(9999.994, 6), " 10000");
/// assert_eq!(cell(12_345_678.0, 7), "1.2e+07");
/// ```
#[must_use]
pub fn cell(value: f64, width: usize) -> String {
    for decimals in [2, 1, 0] {
        let text = fixed(value, decimals);
        if text.len() <= width {
            return format!("{text:>width$}");
        }
    }
    let mut text = exponent(value, usize::from(width >= 7));
    text.truncate(width);
    format!("{text:>width$}")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each line was printed by the C library: value, then a column of 7, a column of 6, and `%6g`.
    #[test]
    fn numbers_read_as_the_c_library_prints_them() {
        let printed_by_c: &[(f64, &str, &str, &str)] = &[
            (0.0, "   0.00", "  0.00", "     0"),
            (0.005, "   0.01", "  0.01", " 0.005"),
            (0.125, "   0.12", "  0.12", " 0.125"),
            (0.375, "   0.38", "  0.38", " 0.375"),
            (1.005, "   1.00", "  1.00", " 1.005"),
            (99.995, " 100.00", "100.00", "99.995"),
            (999.995, "1000.00", "1000.0", "999.995"),
            (9999.995, "10000.0", " 10000", " 10000"),
            (99999.95, "99999.9", "100000", "99999.9"),
            (999_999.5, "1000000", " 1e+06", " 1e+06"),
            (9_999_999.5, "1.0e+07", " 1e+07", " 1e+07"),
            (12_345_678.0, "1.2e+07", " 1e+07", "1.23457e+07"),
            (9.96e9, "1.0e+10", " 1e+10", "9.96e+09"),
            (1e100, "1.0e+10", "1e+100", "1e+100"),
            (1e-9, "   0.00", "  0.00", " 1e-09"),
            (0.000_012, "   0.00", "  0.00", "1.2e-05"),
            (123_456.5, " 123456", "123456", "123456"),
        ];
        for &(value, seven, six, g) in printed_by_c {
            assert_eq!(cell(value, 7), seven, "{value}");
            assert_eq!(cell(value, 6), six, "{value}");
            assert_eq!(format!("{:>6}", general(value)), g, "{value}");
        }
    }

    #[test]
    fn what_is_no_number_is_spelled_as_in_c() {
        assert_eq!(cell(f64::NAN, 7), "    nan");
        assert_eq!(cell(f64::INFINITY, 6), "   inf");
        assert_eq!(general(f64::NEG_INFINITY), "-inf");
    }
}
