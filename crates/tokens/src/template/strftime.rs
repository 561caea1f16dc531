//! `strftime` of a naive local time, in the C locale.

const DAYS: [&str; 7] =
    ["Sunday", "Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday"];
const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];

struct Civil {
    year: i64,
    month: i64,
    day: i64,
    /// 0 is Sunday.
    weekday: i64,
    /// 1 is the first of January.
    yearday: i64,
    second_of_day: i64,
}

/// Days since the epoch to a date, by eras of 400 years that begin in March.
fn civil(now: i64) -> Civil {
    let days = now.div_euclid(86_400);
    let shifted = days + 719_468;
    let era = shifted.div_euclid(146_097);
    let day_of_era = shifted.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let march_month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * march_month + 2) / 5 + 1;
    let month = if march_month < 10 { march_month + 3 } else { march_month - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let leap = (year % 4 == 0 && year % 100 != 0) || year % 400 == 0;
    let before = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334];
    let index = usize::try_from(month - 1).unwrap_or_default();
    let yearday = before[index] + day + i64::from(leap && month > 2);
    let weekday = (days + 4).rem_euclid(7);
    Civil { year, month, day, weekday, yearday, second_of_day: now.rem_euclid(86_400) }
}

/// Formats `now` (seconds since the epoch, in local time). Unknown directives stay as they are.
pub(super) fn format(now: i64, format: &str) -> String {
    // The year must stay within what the calendar above can compute with.
    let t = civil(now.clamp(-62_135_596_800, 253_402_300_799));
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        match chars.next() {
            None => out.push('%'),
            Some('-') => match chars.next() {
                None => out.push_str("%-"),
                Some(d) => {
                    let text = directive(&t, d);
                    let bare = text.trim_start_matches(['0', ' ']);
                    out.push_str(if bare.is_empty() { "0" } else { bare });
                }
            },
            Some(d) => out.push_str(&directive(&t, d)),
        }
    }
    out
}

fn directive(t: &Civil, d: char) -> String {
    let name = |names: &[&str], i: i64| {
        usize::try_from(i).ok().and_then(|i| names.get(i).copied()).unwrap_or_default().to_owned()
    };
    let (hour, minute) = (t.second_of_day / 3600, t.second_of_day / 60 % 60);
    let second = t.second_of_day % 60;
    let hour12 = if hour % 12 == 0 { 12 } else { hour % 12 };
    let weekday_monday = (t.weekday + 6) % 7;
    match d {
        'Y' => t.year.to_string(),
        'y' => format!("{:02}", t.year % 100),
        'm' => format!("{:02}", t.month),
        'd' => format!("{:02}", t.day),
        'e' => format!("{:2}", t.day),
        'j' => format!("{:03}", t.yearday),
        'H' => format!("{hour:02}"),
        'I' => format!("{hour12:02}"),
        'M' => format!("{minute:02}"),
        'S' => format!("{second:02}"),
        'f' => "000000".to_owned(),
        'p' => if hour < 12 { "AM" } else { "PM" }.to_owned(),
        'A' => name(&DAYS, t.weekday),
        'a' => name(&DAYS, t.weekday).chars().take(3).collect(),
        'B' => name(&MONTHS, t.month - 1),
        'b' | 'h' => name(&MONTHS, t.month - 1).chars().take(3).collect(),
        'w' => t.weekday.to_string(),
        'u' => (weekday_monday + 1).to_string(),
        'U' => format!("{:02}", (t.yearday + 6 - t.weekday) / 7),
        'W' => format!("{:02}", (t.yearday + 6 - weekday_monday) / 7),
        'F' => format!("{}-{:02}-{:02}", t.year, t.month, t.day),
        'D' | 'x' => format!("{:02}/{:02}/{:02}", t.month, t.day, t.year % 100),
        'T' | 'X' => format!("{hour:02}:{minute:02}:{second:02}"),
        'R' => format!("{hour:02}:{minute:02}"),
        'c' => {
            let (a, b) = (directive(t, 'a'), directive(t, 'b'));
            format!("{a} {b} {:2} {} {}", t.day, directive(t, 'T'), t.year)
        }
        // A naive time has no zone.
        'Z' | 'z' => String::new(),
        '%' => "%".to_owned(),
        'n' => "\n".to_owned(),
        't' => "\t".to_owned(),
        other => format!("%{other}"),
    }
}

#[cfg(test)]
mod tests {
    use super::format;

    #[test]
    fn dates_are_the_calendars() {
        let all = "%d %b %Y %B %A %a %m %y %j %H:%M:%S %I %p %U %W %w %F %-d %-m %e %%";
        // 2024-02-29 was a leap day and a Thursday.
        assert_eq!(
            format(1_709_210_096, all),
            "29 Feb 2024 February Thursday Thu 02 24 060 12:34:56 12 PM 08 09 4 2024-02-29 29 2 29 %"
        );
        assert_eq!(
            format(0, "%A %d %B %Y %c"),
            "Thursday 01 January 1970 Thu Jan  1 00:00:00 1970"
        );
        assert_eq!(format(-1, "%Y-%m-%d %j"), "1969-12-31 365");
        assert_eq!(format(i64::MAX, "%Y"), "9999");
        assert_eq!(format(i64::MIN, "%q %"), "%q %");
    }
}
