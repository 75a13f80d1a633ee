// SPDX-License-Identifier: Apache-2.0
// The document and the tables of a calibration; docs/cli.md, "calibrate", is their contract. Pure.
#ifndef KVSTRATA_CLIENT_CLI_CALIBRATION_DOCUMENT_H_
#define KVSTRATA_CLIENT_CLI_CALIBRATION_DOCUMENT_H_

#include <ostream>
#include <string>
#include <vector>

#include "client/cli/calibrate.h"
#include "client/cli/calibrated_plans.h"
#include "client/cli/printer.h"

namespace kvstrata::cli {

// `paths` beside the traces; `file`: where the plans were written, "" if nowhere.
Json CalibrationDocument(const std::vector<Trace>& traces, const std::vector<std::string>& paths,
                         const Calibration& calibration, const std::vector<CalibratedPlan>& plans,
                         const std::string& file);
void PrintCalibration(const Style& style, const Json& document, std::ostream& out);

}  // namespace kvstrata::cli

#endif  // KVSTRATA_CLIENT_CLI_CALIBRATION_DOCUMENT_H_
