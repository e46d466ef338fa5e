//! Adapters to what runs the jobs and to what they report.
