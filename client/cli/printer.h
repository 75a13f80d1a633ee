// SPDX-License-Identifier: Apache-2.0
// Printer: one document, six forms. A verb makes a JSON document (its keys are docs/cli.md's
// contract) and says how a table shows it; -o json and -o yaml print the document itself, -o csv
// its rows with the document's values, -o name the first column of each.
//
// Pure functions that write to the stream they are given. Text from other processes (client names)
// has its control characters escaped in tables, so that nobody can repaint an operator's terminal.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <ostream>
#include <span>
#include <string>
#include <string_view>

namespace kvstrata::cli {

using Json = nlohmann::ordered_json;

enum class Format { kTable, kWide, kJson, kYaml, kCsv, kName };

struct Style {
  Format format = Format::kTable;
  bool headers = true;  // --no-headers: rows only, for `cut` and `awk`
  size_t width = 0;     // cells that a line of a list may have; 0: any number

  // With titles, notes and further lists around the list that csv and name have alone.
  bool IsTable() const { return format == Format::kTable || format == Format::kWide; }
  bool IsDocument() const { return format == Format::kJson || format == Format::kYaml; }
};

// One column of a list, or one line of a record.
struct Column {
  std::string_view header;   // no spaces in it
  std::string_view pointer;  // JSON pointer into the row: "/geometry/layers"
  std::string (*format)(const Json& value) = nullptr;  // null: as it is
  bool right = false;                                  // aligned to the right: numbers
  // For a list that is too wide the column of the lowest rank falls away first, of equal ones the
  // last. The first column is what the row is called: it never does.
  uint8_t rank = 0;
  // Text that may be cut at its end, to no fewer cells, before a column falls away; 0: never cut,
  // but for a first column that has no room alone.
  uint8_t shortest = 0;
};

// Prints `document`; as a table, one line per element of document[rows].
void PrintList(const Style& style, const Json& document, std::string_view rows,
               std::span<const Column> columns, std::ostream& out);
// The same behind an empty line, below another table; in other forms nothing: the first had all.
void PrintBelow(const Style& style, const Json& document, std::string_view rows,
                std::span<const Column> columns, std::ostream& out);
// Prints `document`; as a table, one "HEADER  value" line per column. A value that is longer than
// the terminal's line goes on below itself.
void PrintRecord(const Style& style, const Json& document, std::span<const Column> columns,
                 std::ostream& out);
// -o json or -o yaml of any document. REQUIRES: it is one of these two.
void PrintDocument(Format format, const Json& document, std::ostream& out);

// YAML 1.2 of a JSON document, block style; strings that could be read as anything else are quoted.
std::string ToYaml(const Json& document);

// Formats of columns. A missing or null value prints as "-".
std::string Bytes(const Json& value);         // "1.5 GiB"
std::string Microseconds(const Json& value);  // "3m12s"
std::string YesNo(const Json& value);
std::string Fixed2(const Json& value);   // 12.34
std::string Fixed4(const Json& value);   // 0.9123
std::string Percent(const Json& value);  // 0.5 -> "50.0 %"

// Control characters as \xNN.
std::string Printable(std::string_view text);
// Printable text; "-" for the empty one that proto3 has instead of none.
std::string OrDash(const Json& value);
// Terminal cells of UTF-8 text; every code point counts as one.
size_t Width(std::string_view text);

}  // namespace kvstrata::cli
