//! Splits a line of a CSV file into its cells.
//!
//! **Properties.** The cost of a line grows with its length only: the table of the parser is made once for a file, not
//! once for a line. Memory is bounded by the longest line and [`MAX_COLUMNS`].

use csv_core::{ReadRecordResult, Reader, ReaderBuilder};

/// Columns beyond this are ignored.
pub(crate) const MAX_COLUMNS: usize = 512;

/// Reads rows, one line each. It keeps nothing between two lines but its memory.
#[derive(Debug, Default)]
pub(crate) struct RowReader {
    /// The parser and the delimiter that it was made for.
    parser: Option<(char, Box<Reader>)>,
    text: Vec<u8>,
    ends: Vec<usize>,
}

impl RowReader {
    /// The cells of a line, without quotes and spaces around them. A cell that is no text is empty.
    pub(crate) fn cells(&mut self, line: &[u8], delimiter: char) -> impl Iterator<Item = &str> {
        let count = self.split(line, delimiter);
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        let cell = |(start, end): (usize, &usize)| std::str::from_utf8(&self.text[start..*end]).unwrap_or("").trim();
        starts.zip(&self.ends[..count]).map(cell)
    }

    /// Fills `text` and `ends`; returns how many cells there are.
    fn split(&mut self, line: &[u8], delimiter: char) -> usize {
        if self.parser.as_ref().is_none_or(|(made_for, _)| *made_for != delimiter) {
            self.parser = Some((delimiter, Box::new(ReaderBuilder::new().delimiter(delimiter as u8).build())));
        }
        let Some((_, parser)) = &mut self.parser else { return 0 };
        parser.reset();
        // Cells are never longer than the line.
        self.text.resize(line.len(), 0);
        self.ends.resize(MAX_COLUMNS, 0);
        let (mut read, mut written, mut count) = (0, 0, 0);
        loop {
            // The call with nothing left to read tells the parser that the row has ended.
            let (result, n_read, n_written, n_ends) =
                parser.read_record(&line[read..], &mut self.text[written..], &mut self.ends[count..]);
            (read, written, count) = (read + n_read, written + n_written, count + n_ends);
            if result != ReadRecordResult::InputEmpty {
                return count;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cells(line: &[u8], delimiter: char) -> Vec<String> {
        RowReader::default().cells(line, delimiter).map(str::to_owned).collect()
    }

    #[test]
    fn cells_lose_quotes_and_spaces() {
        assert_eq!(cells(b"1, 0.5 ,,\"a,b\"", ','), ["1", "0.5", "", "a,b"]);
        assert_eq!(cells(b"1;2,5", ';'), ["1", "2,5"]);
        assert_eq!(cells(b"say \"so\";\"he \"\"said\"\"\"", ';'), ["say \"so\"", "he \"said\""]);
        assert_eq!(cells(b"1\t\xff\t3", '\t'), ["1", "", "3"]);
        assert_eq!(cells(b"\"open,1", ','), ["open,1"]);
        assert!(cells(b"", ',').is_empty());
    }

    #[test]
    fn a_row_leaves_nothing_for_the_next_one() {
        let mut reader = RowReader::default();
        assert_eq!(reader.cells(b"\"never closed,1,2,3", ',').count(), 1);
        assert_eq!(reader.cells(b"1,2", ',').collect::<Vec<_>>(), ["1", "2"]);
        assert_eq!(reader.cells(b"1;2", ';').collect::<Vec<_>>(), ["1", "2"]);
    }

    #[test]
    fn columns_beyond_the_limit_are_ignored() {
        let line = vec![b','; 10 * MAX_COLUMNS];
        assert_eq!(cells(&line, ',').len(), MAX_COLUMNS);
    }
}
