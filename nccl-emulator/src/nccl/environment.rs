//! `NCCL_*` variables, read as NCCL reads them.

use super::debug::{info, subsystem};

/// Returns the text of the variable, if it is set.
pub(crate) fn text(name: &str) -> Option<String> {
    super::env_plugin::text(name)
}

/// Returns the variable as an integer (decimal, `0x…` or `0…`), if it is set to one.
pub(crate) fn integer(name: &str) -> Option<i32> {
    let value = text(name).filter(|value| !value.is_empty())?;
    match parse(value.trim()) {
        Some(number) => {
            info!(subsystem::ENV, "{name} set by environment to {number}.");
            Some(number)
        }
        None => {
            info!(
                subsystem::ENV,
                "Invalid value {value} for {name}, using default."
            );
            None
        }
    }
}

/// Returns the variable as a switch, which is off unless set to something other than 0.
pub(crate) fn switch(name: &str) -> bool {
    integer(name).is_some_and(|value| value != 0)
}

fn parse(value: &str) -> Option<i32> {
    let (negative, digits) = value
        .strip_prefix('-')
        .map_or((false, value), |rest| (true, rest));
    let number = if let Some(hexadecimal) = digits
        .strip_prefix("0x")
        .or_else(|| digits.strip_prefix("0X"))
    {
        i64::from_str_radix(hexadecimal, 16)
    } else if digits.len() > 1 && digits.starts_with('0') {
        i64::from_str_radix(&digits[1..], 8)
    } else {
        digits.parse()
    };
    i32::try_from(if negative {
        -number.ok()?
    } else {
        number.ok()?
    })
    .ok()
}

#[cfg(test)]
mod tests {
    use super::parse;

    #[test]
    fn numbers_are_read_in_every_base_that_c_knows() {
        assert_eq!(
            ["12", "-1", "0x10", "010", "0", "", "x", "1x"].map(parse),
            [
                Some(12),
                Some(-1),
                Some(16),
                Some(8),
                Some(0),
                None,
                None,
                None
            ]
        );
    }
}
