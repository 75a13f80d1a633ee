// SPDX-License-Identifier: Apache-2.0
#include "server/store/prompts/opening.h"

#include <utility>

#include "server/store/books/books.h"
#include "server/store/books/plans.h"

namespace kvstrata {

Result<Opening> BeginOpening(StoreMutex* mu, SessionCatalog* catalog, const Plans& plans,
                             uint64_t session_id, uint64_t model_id, std::string_view plan_text) {
  KVS_ASSIGN_OR_RETURN(const Plan named, plans.ResolvePlan(plan_text));
  auto s = std::make_unique<Sequence>();
  Opening o;
  {
    StoreLock lock(*mu);
    KVS_ASSIGN_OR_RETURN(Session * session, catalog->FindSession(session_id));
    o.device = session->device;
    KVS_ASSIGN_OR_RETURN(const Session::KnownModel* known, FindModel(*session, model_id));
    s->model = known->first;
    s->chain = known->second;
    s->imported = session->imports.contains(model_id);
    o.tenant = session->tenant->name;
  }
  KVS_ASSIGN_OR_RETURN(s->plan, plans.PlanFor(named, s->model->desc.geometry));
  s->index = IndexOf(s->plan, s->model->desc.geometry);
  o.session = session_id;
  o.model = s->model;
  o.sequence = std::move(s);
  return o;
}

}  // namespace kvstrata
