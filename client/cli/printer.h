// Printer: one document, three forms. A verb makes a JSON document (its keys are docs/cli.md's
// contract) and says how a table shows it; -o json and -o yaml print the document itself.
//
// Pure functions that write to the stream they are given. Text from other processes (client names)
// has its control characters escaped in tables, so that nobody can repaint an operator's terminal.
#ifndef KVSTRATA_CLIENT_CLI_PRINTER_H_
#define KVSTRATA_CLIENT_CLI_PRINTER_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <ostream>
#include <span>
#include <string>
#include <string_view>

namespace kvstrata::cli {

using Json = nlohmann::ordered_json;

enum class Format { kTable, kJson, kYaml };

struct Style {
  Format format = Format::kTable;
  bool headers = true;  // --no-headers: rows only, for `cut` and `awk`
};

// One column of a list, or one line of a record.
struct Column {
  std::string_view header;
  std::string_view pointer;  // JSON pointer into the row: "/geometry/layers"
  std::string (*format)(const Json& value) = nullptr;  // null: as it is
  bool right = false;                                  // aligned to the right: numbers
};

// Prints `document`; as a table, one line per element of document[rows].
void PrintList(const Style& style, const Json& document, std::string_view rows,
               std::span<const Column> columns, std::ostream& out);
// Prints `document`; as a table, one "HEADER  value" line per column.
void PrintRecord(const Style& style, const Json& document, std::span<const Column> columns,
                 std::ostream& out);
// -o json or -o yaml of any document. REQUIRES: format is not kTable.
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

#endif  // KVSTRATA_CLIENT_CLI_PRINTER_H_
