// Package faults has only tests: real faults of real servers, processes and networks, and what the library promises
// there, measured.
//
// Holders are processes of their own, run from the test binary, that can be stopped and killed. They believe in a lease
// until its context has ended and Err says so. An observer in the process of the test, with connections of its own, asks
// Redis every few milliseconds who has the key and for how long, and takes it as soon as it is free. From both come two
// figures, which have to be zero wherever Redis keeps a key for its TTL:
//
//   - stale belief: for how long a lease was believed in after its key could be another's
//   - overlap: for how long it was believed in after the next holder had the key
//
// A control timer in each process tells how late this machine's own timers are. A belief that ended before the first
// moment at which the key could have gone is in time however late they were. About any other nothing is said if they were
// later than half of the margin when it mattered: the round is inconclusive and run again, and five such rounds in a row
// are a failure. So is a lease that was lost while it should have been kept.
//
// What is promised, fault by fault. "In time" is: the context ends before the key can be another's, for the reason
// ErrUnconfirmed and not before the end of trust, and the next holder's key stays as it is. "Kept" is: no lease is lost.
//
//	fault                                             promise                          test
//	server stopped for longer than trust lasts        in time                          TestAServerIsStoppedForLongerThanTrustLasts
//	server stopped for a quarter of a TTL             kept                             TestAServerIsStoppedForAQuarterOfATTL
//	server killed                                     in time                          TestAServerIsKilled
//	server restarted empty                            told ErrTaken or ErrGone by the  TestAServerIsKilledAndRestartedEmpty
//	                                                  next renewal; no exclusion
//	CLIENT KILL, all the time                         kept                             TestConnectionsAreKilledByTheServer
//	CLIENT PAUSE for half a TTL                       kept                             TestClientsArePausedForHalfATTL
//	CLIENT PAUSE for two TTLs                         in time                          TestClientsArePausedForTwoTTLs
//	SCRIPT FLUSH, all the time                        nothing happens                  TestScriptsAreFlushedAllTheTime
//	maxmemory, nothing to evict                       OOM for an acquisition; kept     TestAServerWithoutMemoryRefusesAcquisitionsAndKeepsLeases
//	maxmemory, the lock's key is evicted              as restarted empty               TestALocksKeyIsEvicted
//	error replies for half a TTL                      kept                             TestAServerRefusesForHalfATTL
//	error replies for longer than trust lasts         in time, with Redis' error       TestAServerRefusesForLongerThanTrustLasts
//	user with the least rights                        a whole life                     TestAUserWithTheLeastRightsHoldsLeases
//	user deleted for half a TTL, for good             kept; in time                    TestAUserIsTakenAwayForHalfATTL, TestAUserIsTakenAway
//	TLS: connections killed, server stopped           kept; in time                    TestLeasesOverTLSOutliveTheirConnections,
//	                                                                                   TestAServerIsStoppedUnderLeasesOverTLS
//	TLS: certificate not trusted                      that error; nothing is taken     TestAServerThatIsNotTrustedGetsNoLease
//
//	holder stopped until another holds the key        no write whose check began then  TestAHolderIsStoppedAndAnotherBegins
//	                                                  (one whose check came before may
//	                                                  land: the gap)
//	holder stopped, then releases                     the next holder's key stays      TestAStoppedHoldersReleaseLeavesTheNextHoldersKey
//	holder stopped for a quarter of a TTL             kept                             TestAHolderIsStoppedForAQuarterOfATTL
//	holder killed                                     its key lapses within a TTL      TestAHolderIsKilled
//	... while it acquires, renews or releases         the same                         TestAHolderIsKilledAtAnyMoment
//
//	black hole for requests, replies, both            in time                          TestTheNetworkIsABlackHole
//	requests arrive late, under another holder        in time                          TestTheNetworkDeliversLate
//	open connections silent for ever, new ones work   kept                             TestOpenConnectionsAreSilentForEverWhileNewOnesWork
//	connections reset at random                       kept                             TestConnectionsAreResetAtRandom
//	replies late by up to 0.5 TTL                     kept                             the root's TestTheContextEndsBeforeTheKeyCanExpire
//	one reply lost, in any way, at any step           settled, or ErrOutcomeUnknown    the root's TestAnAcquisitionThatLosesAReplyInAnyWayAtAnyStep
//	a release unanswered                              sent once; the key lapses        the root's TestC59AReleaseWhoseReplyIsLostIsSentOnce
//
//	Sentinel: master killed or stopped                kept or in time                  TestAMasterIsFailedOver
//	Sentinel: failover by an operator                 kept or in time                  TestAMasterIsFailedOverByAnOperator
//	Sentinel: the promoted replica lacks the keys     told ErrTaken or ErrGone by the  TestAFailoverLosesTheKeys
//	                                                  new master; no exclusion
//	old master cut off from its replica, which is     with min-replicas-to-write: in   TestAnOldMasterThatMustHaveAReplicaConfirmsNothingWithoutIt
//	promoted                                          time; else no exclusion
//
//	Cluster: slot moves during acquire, renew and     nothing happens                  TestC44ASlotMovesUnderItsLeases
//	release
//	Cluster: master killed or stopped                 kept or in time                  TestAClustersMasterIsFailedOver
//	Cluster: replica takes over by CLUSTER FAILOVER   kept                             TestAClustersMasterHandsOverToItsReplica
//
//	most of the above, at random, under two           never two holders                TestTwoProcessesNeverHoldAKeyAtOnceWhateverHappens
//	processes that compete
//
// What is promised of fences (WithFencing): each is greater than all that leases of the key had before.
//
//	fault                                             promise                          test
//	restarted empty, flushed, deleted, evicted        greater                          TestFencesGrowAlthoughTheLastOneIsLost
//	failover to an empty or lagging replica           greater                          TestFencesGrowOverAFailover
//	... by Sentinels                                  greater                          TestFencesGrowOverAFailoverBySentinels
//	server's clock set back, forward, both            greater                          TestFencesGrowWhereverTheServersClockGoes,
//	                                                                                   TestAServersClockIsSetUnderALease
//	last fence lost, server's clock set back, and a   none: it may be smaller; with    TestAFenceFallsBackOnlyWithNumberClockAndLockerBehind
//	Locker that has not seen it                       any two of the three, greater
//	TIME refused                                      the caller's clock stands in     TestTheCallersClockStandsInWhereTIMEIsRefused
//	user with the least rights, with and without TIME a whole life                     TestAUserWithTheLeastRightsHoldsFencedLeases
//	user without a right to the companion             NOPERM; nothing is taken         TestAUserWhoMayNotTouchTheCompanionGetsNoFencedLease
//	OOM, NOPERM, READONLY, NOREPLICAS, a fence that   that error at once; nothing is   TestAFencedAcquisitionThatIsRefusedLeavesNothing
//	is no number                                      taken, no number drawn
//	Cluster: any key                                  the fence is in its slot, or     TestAFenceIsKeptInTheSlotOfItsKey
//	                                                  the key refused
//	Cluster: slot moves                               TRYAGAIN to a Try; a wait rides  TestASlotMovesUnderFencedLeases
//	                                                  it out; leases are kept
//	holder stopped until another holds the key        the other's is greater, its own  TestAStoppedHoldersFenceIsSmallerThanTheNextHolders
//	                                                  the same
//	CLIENT KILL, lost replies, FLUSHALL, all the      one number for one token;        TestFencesOfManyClientsGrowAlthoughTheirConnectionsAreKilled,
//	time, under eight clients that compete            refusals draw none               TestFencesOfManyClientsGrowAlthoughRepliesAreLost,
//	                                                                                   TestFencesOfManyClientsGrowAlthoughAllKeysAreFlushed
//
// What is promised of waiters: a release wakes them; where it cannot, they find the free key by polling.
//
//	fault                                             promise                          test
//	Cluster: whichever node is listened to            woken                            TestWaitersOfAClusterAreWoken
//	... and that node is killed                       another one is listened to       TestWaitersOfAClusterOutliveTheNodeThatTheyListenTo
//	failover by Sentinels                             the new master is listened to    TestWaitersAreWokenByTheNewMaster
//
// A lease on a cluster outlasts the failover of its node because the library has go-redis look for the new one: by itself
// go-redis looks every ten seconds.
//
// The tests need a redis-server, and those of its clock libfaketime: see package redistest. Run each fault more often
// with
//
//	go test ./internal/faults -faults.rounds=20 -timeout=1h
package faults
