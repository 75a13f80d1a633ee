// SPDX-License-Identifier: Apache-2.0
// Names of the store's owners and of its records, for headers that hold them by reference alone.
// Who looks into one includes its own header.
#pragma once

namespace kvstrata {

class Answers;
struct Arena;
struct Artefact;
class ArtefactLedger;
struct Books;
class BuildPages;
class Builds;
class CapacityCounter;
class ClusterTenants;
class CodecExtents;
struct CodecState;
struct CopyPlan;
class Devices;
class Eviction;
struct Extent;
struct FreshPages;
class Inspection;
class Lookups;
struct Model;
struct ModelDesc;
class Models;
class Moves;
struct Opening;
class OpeningEnds;
class Openings;
struct Page;
class PageAllocator;
class PageCopies;
class PageHolds;
class PageReferences;
class Plans;
class PrefixCatalog;
class PrefixLoads;
class PrefixPins;
class RawPages;
class RecallAudits;
class Recompression;
struct RecompressResult;
class Relief;
class Replication;
struct Sequence;
class SequenceEntry;
class Sequences;
struct Session;
class SessionCatalog;
struct StagedPage;
class StepEvents;
class Store;
struct StoreOptions;
struct StoreSettings;
class Tables;
struct Taker;
struct Tenant;
class UserLimits;
class Watermarks;

}  // namespace kvstrata
